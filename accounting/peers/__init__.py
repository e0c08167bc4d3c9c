"""Bounds of other systems and papers, for comparison tables only: no run is halted by one."""
