"""One run and its folder: experiment, run, rows, tables, plots, pages."""
