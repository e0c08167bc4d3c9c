"""One run and its folder: experiment, run, rows, tables, plots, pages."""

if __name__ != "shufl.results":
    raise ImportError("this folder is a part of the package shufl: import shufl.results")
