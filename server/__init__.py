"""The server: guard, broadcast, fetch the shuffled batch, aggregate, step, evaluate, checkpoint.

`make_server_app` gives the Flower ServerApp; the rest are its parts, each usable alone.

The names of `__init__.pyi` are imported when they are first used, so that a configuration is
checked without torch and Flower.
"""

if __name__ != "shufl.server":
    raise ImportError("this folder is a part of the package shufl: import shufl.server")

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
