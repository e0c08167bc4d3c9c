"""What is learnt: configuration, data, models, tasks, and how a user's update is computed.

The names of `__init__.pyi` are imported when they are first used.
"""

if __name__ != "shufl.learning":
    raise ImportError("this folder is a part of the package shufl: import shufl.learning")

import sys
from importlib.abc import MetaPathFinder
from typing import Any

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _MissingOperators(MetaPathFinder):
    """Declares two operators of torchvision while it is imported, if its library did not load.

    torchvision 0.28 from the package index is built with CUDA; beside a CPU wheel of torch its
    compiled operators do not load, and its import then fails on registering fakes for the missing
    `torchvision::nms` and `qnms`. Datasets, transforms and models do not use them.
    """

    _library: Any = None  # the operators live as long as this reference

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Finds nothing; of all imports only the one that registers the fakes is acted on."""
        if fullname != "torchvision._meta_registrations":
            return
        import torch

        if not hasattr(torch.ops.torchvision, "nms"):
            self._library = torch.library.Library("torchvision", "FRAGMENT")
            self._library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self._library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _MissingOperators())  # in every process, before any code of yours
