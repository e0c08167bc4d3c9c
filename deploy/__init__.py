"""Runs on real machines: what each site has, and the commands that make, start and watch them.

A deployment is a server with Flower's SuperLink, shufflers, and nodes, each with Flower's SuperNode
and a process of its own that has the data. docs/deployment.md tells how it is set up.
"""

if __name__ != "shufl.deploy":
    raise ImportError("this folder is a part of the package shufl: import shufl.deploy")
