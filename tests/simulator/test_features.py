"""Features: the scattering transform, maps of one's own, and the file that processes share."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from shufl.learning.data import features
from shufl.learning.data.datasets import load_dataset
from shufl.learning.data.features import load_records, map_records
from shufl.learning.data.scattering import dead_leaves, scattering, whitened, whitening
from shufl.protocol.validation import ConfigError


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache folder of its own, and no features in this process's memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    features.mapped.cache_clear()
    yield tmp_path / "shufl" / "features"
    features.mapped.cache_clear()


def image():
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    return (torch.sin(0.9 * x + 0.3 * y) * torch.cos(0.05 * x * y))[None, None]


def test_the_transform_is_kymatio_s():
    """Numbers of kymatio 0.3.0, Scattering2D(J=2, shape=(28, 28), L=8)."""
    found = scattering(image())
    assert found.shape == (1, 81, 7, 7)
    of_kymatio = {
        0: -0.11944425, 3: 0.02973138, 11: 0.00996553, 20: 0.00278718, 50: 0.00114891,
        80: 0.00487142,
    }  # fmt: skip
    for channel, value in of_kymatio.items():
        assert found[0, channel, 3, 2].item() == pytest.approx(value, rel=3e-4)


@pytest.mark.slow
def test_a_record_s_features_do_not_depend_on_the_others():
    records = load_dataset("digits").train_features[:10]
    together = map_records("scattering", records)
    assert together.shape == (10, 81, 2, 2)
    reversed_order = map_records("scattering", records.flip(0)).flip(0)
    alone = torch.cat([map_records("scattering", record) for record in records.split(1)])
    assert torch.allclose(together, reversed_order, atol=1e-5)
    assert torch.allclose(together, alone, atol=1e-5)


def few_digits():
    """The first of the digits: what is made of all of them takes seconds."""
    digits = load_dataset("digits")
    parts = {
        f"{part}_{kind}": getattr(digits, f"{part}_{kind}")[:count]
        for part, count in (("train", 40), ("test", 4))
        for kind in ("features", "labels")
    }
    return replace(digits, **parts)


def spread(planes):
    """The variances along the principal directions of the channels, the largest first."""
    return torch.linalg.eigvalsh(planes.movedim(1, -1).flatten(0, -2).T.cov()).flip(0)


@pytest.mark.slow
def test_whitening_makes_channels_alike_also_those_of_images_that_it_was_not_made_from():
    leaves = functional.group_norm(scattering(dead_leaves()), 27)
    mean, matrix = whitening(leaves)
    variances = spread(leaves)
    expected = variances / (variances + 0.3 * variances.mean())
    assert torch.allclose(spread(whitened(leaves, mean, matrix)), expected, atol=1e-3)
    digits = load_dataset("digits")
    images = functional.interpolate(digits.inputs(digits.train_features[:100]), scale_factor=4)
    before = functional.group_norm(scattering(images), 27)
    after = whitened(before, mean, matrix)
    assert torch.equal(map_records("scattering", images), after)
    ratios = [(found[0] / found[40]).item() for found in map(spread, (before, after))]
    assert ratios[1] < ratios[0] / 10


def test_features_are_kept_and_a_damaged_file_is_not_used(fresh):
    name = f"{__name__}:few_digits"
    first = load_records(name, "scattering")
    (path,) = fresh.iterdir()
    expected = first.train_features.clone()
    for damage in (lambda data: data[: len(data) // 2], lambda data: flipped(data)):
        features.mapped.cache_clear()
        path.write_bytes(damage(path.read_bytes()))
        assert torch.equal(load_records(name, "scattering").train_features, expected)
    features.mapped.cache_clear()
    before = path.stat().st_mtime_ns
    assert torch.equal(load_records(name, "scattering").train_features, expected)
    assert path.stat().st_mtime_ns == before  # read, not made again
    assert [each.name for each in fresh.iterdir()] == [path.name]


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_maps_of_ones_own_are_checked(fresh, tmp_path, monkeypatch):
    (tmp_path / "own_maps.py").write_text(
        "import sys, torch\n"
        "def exits(records): sys.exit()\n"
        "def ragged(records): return records.flatten(1)[:, : 3 + len(records)]\n"
        "def widens(records): return records.flatten(1)[:, : 3 + (len(records) == 29)]\n"
        "def halves(records): return records.flatten(1)[:, ::2].clone()\n"
        "def mixes(records): return (records - records.mean(0)).flatten(1)\n"
        "def mixes_long(records): return (records - (records.mean(0) if len(records) > 9 else 0))"
        ".flatten(1)\n"
        "seen = []\n"
        "def remembers(records):\n"
        "    seen.append(records.mean())\n"
        "    return (records - seen[-2 if len(seen) > 1 else -1]).flatten(1)\n"
        "def wide(records): return records.double()\n"
        "def broken(records): return records.flatten(1) / 0\n"
        "def learnt(records): return torch.nn.Parameter(records.flatten(1))\n"
        "def sparse(records): return records.flatten(1).to_sparse()\n"
        "def none(records): return records.flatten(1)[:, :0]\n"
        "def one(records): return records.sum()\n"
        "def doubles(records): return records.mul_(2).flatten(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mapped = load_records("digits", "own_maps:halves")
    raw = load_dataset("digits")
    assert torch.equal(mapped.test_features, raw.inputs(raw.test_features).flatten(1)[:, ::2])
    doubled = load_records("digits", "own_maps:doubles")  # the first records are tried before
    assert torch.equal(doubled.train_features, 2 * raw.inputs(raw.train_features).flatten(1))
    assert not fresh.exists()
    for name, message in {
        "learnt": "must give .* without gradients, got float32 with gradients",
        "sparse": "must give a dense tensor of float32 .* got float32, sparse_coo, on cpu",
        "none": r"must give features of shape .* got shape \(1, 0\)",
        "one": r"must give features of shape .* got shape \(\)",
        "mixes": "must map each record by itself",
        "mixes_long": "must map each record by itself",
        "remembers": "must map each record by itself",
        "ragged": "must map each record by itself",
        "widens": r"must give features of shape \(3,\) for every record .* got \(4,\)",
        "wide": "must give a dense tensor of float32 .* got float64",
        "broken": "must give finite features",
        "nothing": "could not be imported",
        "exits": r"could not map records of shape \(1, 8, 8\): it calls sys.exit\(None\)",
    }.items():
        with pytest.raises(ConfigError, match=f"^data.features own_maps:{name} {message}"):
            load_records("digits", f"own_maps:{name}")
    del sys.modules["own_maps"]


def test_a_dataset_of_ones_own_may_have_lists_for_its_mean_and_deviation(fresh):
    given = replace(few_digits(), mean=[0.3], std=[0.2])
    whole = replace(given, mean=(0.3,), std=(0.2,))
    ours, theirs = (features.mapped(each, "scattering") for each in (given, whole))
    assert torch.equal(ours.test_features, theirs.test_features)
