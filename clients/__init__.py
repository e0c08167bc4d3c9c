"""What runs on a user's device: check in, compute an update, clip, add noise, seal, submit.

`make_client_app` gives the Flower ClientApp of a simulation, `serve_device` the process of a
deployed node; the rest are their parts, each usable alone. Coins and the noisy report itself are in
`shufl.protocol.mechanisms`.

The names of `__init__.pyi` are imported when they are first used, so that the deployed ClientApp
(`shufl.clients.relay`) starts without torch.
"""

if __name__ != "shufl.clients":
    raise ImportError("this folder is a part of the package shufl: import shufl.clients")

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
