"""Datasets to choose settings on: the last training records stand for the test set."""

from __future__ import annotations

from dataclasses import replace

from shufl.learning.data.datasets import Dataset, load_dataset


def mnist() -> Dataset:
    """MNIST: 50 000 training records, and the other 10 000 to try on."""
    return held_out(load_dataset("mnist"), 10_000)


def fashion_mnist() -> Dataset:
    """Fashion-MNIST, likewise."""
    return held_out(load_dataset("fashion-mnist"), 10_000)


def held_out(dataset: Dataset, records: int) -> Dataset:
    """The dataset's training records alone, the last so many of them as test set."""
    features, labels = dataset.train_features, dataset.train_labels
    return replace(
        dataset,
        train_features=features[:-records],
        train_labels=labels[:-records],
        test_features=features[-records:],
        test_labels=labels[-records:],
        users=None if dataset.users is None else dataset.users[:-records],
    )
