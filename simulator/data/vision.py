"""torchvision, imported so that it also works beside a CPU-only wheel of torch."""

from __future__ import annotations

import torch

_library: torch.library.Library | None = None  # the operators live as long as this reference


def torchvision_datasets():
    """The module `torchvision.datasets`.

    torchvision 0.28 from the package index is built with CUDA; beside a CPU wheel of torch its
    compiled operators do not load, and its import then fails on registering a fake for the missing
    `torchvision::nms`. Declaring the operator first lets the import pass; datasets, transforms and
    models do not use it.
    """
    global _library
    try:
        torch.ops.torchvision.nms  # noqa: B018
    except (AttributeError, RuntimeError):
        if _library is None:
            _library = torch.library.Library("torchvision", "FRAGMENT")
            _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.datasets

    return torchvision.datasets
