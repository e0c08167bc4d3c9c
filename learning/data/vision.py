"""torchvision's import, by our code or the reader's, also beside a CPU-only wheel of torch."""

from __future__ import annotations

from importlib.abc import MetaPathFinder
from typing import Any


class MissingOperators(MetaPathFinder):
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
