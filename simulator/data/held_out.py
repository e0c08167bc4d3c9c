"""Datasets to choose settings on: the last training records stand for the test set."""

from __future__ import annotations

from dataclasses import replace

from simulator.data.datasets import Dataset, load_dataset

_HELD_OUT = 10_000


def mnist() -> Dataset:
    """MNIST: 50 000 training records, and the other 10 000 to try on."""
    return _held_out("mnist")


def fashion_mnist() -> Dataset:
    """Fashion-MNIST, likewise."""
    return _held_out("fashion-mnist")


def _held_out(name: str) -> Dataset:
    whole = load_dataset(name)
    features, labels = whole.train_features, whole.train_labels
    return replace(
        whole,
        train_features=features[:-_HELD_OUT],
        train_labels=labels[:-_HELD_OUT],
        test_features=features[-_HELD_OUT:],
        test_labels=labels[-_HELD_OUT:],
    )
