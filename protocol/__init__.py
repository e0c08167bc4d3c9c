"""What all parties of a run agree on: plan, mechanisms, events, randomness, the hash chain.

Every room may import this one, and it imports no other. The names of `__init__.pyi` are imported
when they are first used, so that the shuffler can have plans and mechanisms without what
accountants need.
"""

if __name__ != "shufl.protocol":
    raise ImportError("this folder is a part of the package shufl: import shufl.protocol")

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
