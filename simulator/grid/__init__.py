"""Grids of runs: many configurations and seeds at once, their tables and plots."""
