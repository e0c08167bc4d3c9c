"""The accountants: each prices events and says for which pairs its ε holds."""
