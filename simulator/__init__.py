"""Many users on one machine: engines, grids of runs, canaries, histograms."""

if __name__ != "shufl.simulator":
    raise ImportError("this folder is a part of the package shufl: import shufl.simulator")
