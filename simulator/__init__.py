"""Many users on one machine: engines, grids of runs, canaries, histograms."""
