"""The shuffler: a process of its own between user devices and the server.

It sees who sends and cannot read what; the server reads what and is not told who. Reports travel
sealed to the server's key (`seal`), through the shuffler (`IntakeClient`, `ShufflerProcess`), to
the server (`ControlClient`, `ReportOpener`) in an order that says nothing.

The names of `__init__.pyi` are imported when they are first used, as those of `accounting` are.
"""

if __name__ != "shufl.shuffler":
    raise ImportError("this folder is a part of the package shufl: import shufl.shuffler")

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
