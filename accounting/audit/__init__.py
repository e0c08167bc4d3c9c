"""Attacks on privacy claims: an adversary draws rounds and bounds ε and δ from below."""
