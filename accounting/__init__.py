"""What a run of shuffled rounds spends: plan, events, accountants, ledger and budget guard.

No privacy number is computed anywhere else. Each accountant says in `covers` for which neighbouring
datasets its ε holds; print it beside the number.

The names of `__init__.pyi` are imported when they are first used, so that the shuffler can have
`shufl.protocol.mechanisms` without the accountants and what they need.
"""

if __name__ != "shufl.accounting":
    raise ImportError("this folder is a part of the package shufl: import shufl.accounting")

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
