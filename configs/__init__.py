"""Configurations that ship with shufl, as TOML."""
