"""Datasets load, partitions deal each record once, models build or say why not."""

import copy
import gzip
import hashlib
import struct
import sys
from dataclasses import replace

import numpy as np
import pyarrow
import pytest
import torch
from flwr.app import ArrayRecord
from sklearn.datasets import load_digits
from torch import nn

from shufl.learning.config import DATASETS, Data
from shufl.learning.data import datasets
from shufl.learning.data.datasets import (
    Dataset,
    copy_archives,
    dataset_digest,
    held_out,
    load_dataset,
)
from shufl.learning.data.partition import deal, load_users
from shufl.learning.models import ModelMaker
from shufl.learning.parameters import frozen_digest, load_sent, sent
from shufl.learning.tasks import Form
from shufl.learning.your_code import find
from shufl.protocol.validation import ConfigError
from shufl.shuffler import model_digest


def test_digits_are_scikit_learns_split_in_fifths():
    digits = load_dataset("digits")
    order = np.random.Generator(np.random.Philox(key=1797)).permutation(1797)
    images, labels = (array[order] for array in (load_digits().images, load_digits().target))
    both = torch.cat([digits.train_features, digits.test_features])
    assert (both[:, 0].numpy() == images).all()
    assert torch.cat([digits.train_labels, digits.test_labels]).tolist() == labels.tolist()
    assert len(digits.test_labels) == 360
    assert digits.input_shape == (1, 8, 8)
    raw = digits.train_features.clone()
    inputs = digits.inputs(digits.train_features)
    assert (digits.train_features == raw).all()
    assert (inputs.min(), inputs.max()) == (-1.0, 1.0)


def test_names_of_an_older_version_mean_what_they_meant():
    """The published grid over learning rates has them."""
    for name in ("mnist", "fashion_mnist"):
        meant = find("data.dataset", f"shufl.simulator.data.held_out:{name}", DATASETS)
        assert meant is getattr(datasets, f"held_out_{name}")


def test_held_out_records_are_the_last_for_training_and_the_test_set_has_no_part():
    digits = load_dataset("digits")
    half = held_out(digits, 37)
    assert len(half.test_labels) == 37 and half.classes == digits.classes
    for part in ("features", "labels"):
        both = getattr(half, f"train_{part}"), getattr(half, f"test_{part}")
        assert (torch.cat(both) == getattr(digits, f"train_{part}")).all()


def _write_idx(path, array):
    """An IDX file as MNIST has them: magic with type 8 (unsigned byte), big-endian sizes, bytes."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """MNIST's files, unpacked, with fewer images: their folder and the images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHUFL_DATA", raising=False)
    raw = tmp_path / "shufl" / "MNIST" / "raw"
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 28, 28))
    for part, count in (("train", 20), ("t10k", 10)):
        _write_idx(raw / f"{part}-images-idx3-ubyte", images[:count])
        _write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    load_dataset.cache_clear()
    yield raw, images
    load_dataset.cache_clear()


@pytest.mark.parametrize("length", [0, 3, 1000])
def test_a_file_that_was_cut_short_is_unpacked_anew_or_one_line(small_mnist, monkeypatch, length):
    raw, images = small_mnist
    whole = {path: path.read_bytes() for path in raw.iterdir()}
    (raw / "train-images-idx3-ubyte").write_bytes(bytes(length))
    with pytest.raises(ConfigError, match=f"could not be .* read .*, or delete {raw} if files"):
        load_dataset("mnist")
    digests = []
    for path, content in whole.items():
        packed = gzip.compress(content)
        path.with_name(f"{path.name}.gz").write_bytes(packed)
        digests.append((f"{path.name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr("torchvision.datasets.MNIST.resources", digests)
    assert (load_dataset("mnist").train_features.squeeze(1).numpy() == images[:20]).all()


def test_mnist_files_are_read_by_torchvision(small_mnist):
    images = small_mnist[1]
    mnist = load_dataset("mnist")
    assert (mnist.train_features.squeeze(1).numpy() == images[:20]).all()
    assert mnist.test_labels.tolist() == list(range(10))
    expected = (images[3, 5, 6] / 255 - 0.1307) / 0.3081
    assert mnist.inputs(mnist.train_features)[3, 0, 5, 6].item() == pytest.approx(
        expected, abs=1e-6
    )


def test_a_data_folder_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SHUFL_DATA", str(tmp_path / "none"))
    load_dataset.cache_clear()
    with pytest.raises(ConfigError, match=r"SHUFL_DATA must name an existing folder, got .*none"):
        load_dataset("mnist")


def test_archives_are_copied_not_unpacked_in_place(tmp_path, monkeypatch):
    source = tmp_path / "given" / "MNIST" / "raw"
    source.mkdir(parents=True)
    (source / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"x"))
    for _ in range(2):
        copy_archives(
            tmp_path / "given", tmp_path / "cache", source.relative_to(tmp_path / "given"), "*.gz"
        )
    assert [p.name for p in source.iterdir()] == ["train-images-idx3-ubyte.gz"]
    copied = list((tmp_path / "cache" / "MNIST" / "raw").iterdir())
    assert [p.read_bytes() for p in copied] == [gzip.compress(b"x")]


def flowers(**changes):
    """A dataset of your own: three measurements a record."""
    values = {
        "train_features": torch.arange(24.0).reshape(8, 3),
        "train_labels": torch.arange(8) % 2,
        "test_features": torch.ones(2, 3),
        "test_labels": torch.tensor([0, 1]),
        "classes": 2,
        "scale": 2.0,
        "mean": (0.0, 1.0, 2.0),
        "std": (1.0, 1.0, 4.0),
    }
    return Dataset(**(values | changes))


def with_one(value, record):
    """Eight records of three measurements, one of which is `value`."""
    records = torch.zeros(8, 3)
    records[record, 1] = value
    return records


def of_this_module(monkeypatch, make):
    """The name of a dataset that `make` returns."""
    monkeypatch.setattr(sys.modules[__name__], "made_here", make, raising=False)
    load_dataset.cache_clear()
    return f"{__name__}:made_here"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_features": torch.zeros(8, 3, dtype=torch.float64)}, "float32 or int64 .*float64"),
        ({"train_features": np.zeros((8, 3))}, r"got float64: convert it with x.float\(\)"),
        ({"train_features": torch.zeros(8, 3).short()},
         r"float32 or int64 .* got int16: .* x.float\(\), .*numpy"),
        ({"train_features": torch.zeros(8, 3).long()},
         "must have no scale, mean and std with features of int64"),
        ({"train_features": {"age": [0.0] * 8}}, "a dense tensor of .* got dict"),
        ({"train_features": torch.zeros(8, 3).to_sparse()}, "got float32, sparse_coo, on cpu"),
        ({"train_features": torch.nested.nested_tensor([torch.zeros(3)] * 8)},
         "got float32, nested, on cpu"),
        ({"train_features": np.ma.masked_array(np.zeros((8, 3)), False)}, "got MaskedArray"),
        ({"train_features": torch.zeros(8, 0), "test_features": torch.zeros(2, 0)},
         r"at least one number a record, got \(8, 0\) and \(2, 0\)"),
        ({"train_features": torch.zeros(8)}, "features of shape .records, ....* got .8,. and"),
        ({"test_features": torch.ones(2, 4)}, r"alike in training and test, .* got \(8, 3\) and"),
        ({"train_labels": torch.zeros(8)}, "int64 .*, got float32: convert it with x.long"),
        ({"train_labels": torch.arange(7) % 2}, "one train label for each .*, got .7,. labels"),
        ({"test_features": torch.zeros(0, 3), "test_labels": torch.zeros(0).long()},
         "one test label for each of at least one record"),
        ({"train_labels": torch.arange(8)},
         "train_labels from 0 to 1, got others at 6 of 8 records, first at record 3"),
        ({"test_labels": torch.tensor([-1, 1])},
         "test_labels from 0 to 1, got others at 1 of 2 records, first at record 1"),
        ({"classes": 2.0}, "classes, a whole number of at least 1, got 2.0"),
        ({"train_features": torch.zeros(8, 3, requires_grad=True)},
         "train_features as .* without gradients, got float32 with grad"),
        ({"scale": 0.0}, "finite records"),
        ({"train_features": with_one(torch.nan, 7)},
         "finite train_features, got NaN or infinity at 1 of 8 records, first at record 8"),
        ({"train_features": with_one(3e38, 6), "scale": 0.1},
         "finite records .* got others of train_features"),
        ({"test_features": with_one(-torch.inf, 5), "test_labels": torch.arange(8) % 2},
         "finite test_features, got NaN or infinity at 1 of 8 records, first at record 6"),
        ({"mean": (0.0, 1.0)}, "cannot be normalised by its scale, mean and std"),
    ],
)  # fmt: skip
def test_what_is_no_dataset_says_why(monkeypatch, changes, message):
    name = of_this_module(monkeypatch, lambda: flowers(**changes))
    with pytest.raises(ConfigError, match=f"data.dataset {name} .*{message}") as error:
        load_dataset(name)
    assert "\n" not in str(error.value)


IDS = np.arange(24).reshape(8, 3)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        (IDS.astype(np.int32), torch.int64),
        (torch.from_numpy(IDS).int(), torch.int64),
        (IDS.tolist(), torch.int64),
        (tuple((IDS / 2).tolist()), torch.float32),
        (list(torch.from_numpy(IDS)), torch.int64),
        (pyarrow.FixedShapeTensorArray.from_numpy_ndarray(IDS), torch.int64),
    ],
)
def test_columns_and_lists_become_tensors(ids, dtype):
    labels = pyarrow.chunked_array([[0, 1], [1] * 6])
    given = Dataset(ids, labels, ids, labels, classes=2, users=list("abcdefga"))
    assert given.train_features.dtype == given.test_features.dtype == dtype
    assert (given.train_features * (2 if dtype == torch.float32 else 1)).tolist() == IDS.tolist()
    assert given.test_labels.tolist() == [0, *[1] * 7]
    records = f"records (8, 3) {dtype} with labels (8,) int64".replace("torch.", "")
    told = f"training {records}, test {records}, 2 classes, 7 users"
    assert repr(given) == f"<dataset for classification: {told}>"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([[1, 2, 3]] * 7 + [[1, 2]], "train_features must have rows of one length, got others"),
        (np.full((8, 3), "a"), "train_features must be numbers, got text"),
        ([["a secret"]] * 8, "train_features must be numbers, got text"),
        ([[None]] * 8, "train_features must be numbers, got missing values, or objects"),
    ],
)
def test_what_holds_no_numbers_says_why(records, message):
    with pytest.raises(ConfigError, match=message):
        flowers(train_features=records)


def test_a_dataset_shows_no_record():
    shown = repr(flowers(train_features={"secret": [1.0]}))
    assert "training records (dict) with labels (8,) int64, test" in shown


def test_a_callable_of_yours_is_a_dataset_of_tensors_arrays_and_numbers_of_numpy(monkeypatch):
    read_only = np.arange(24, dtype=np.float32).reshape(8, 3)
    read_only.flags.writeable = False
    changes = {
        "train_features": read_only,
        "train_labels": (np.arange(8) % 2)[::-1],
        "test_labels": np.array([0, 1]),
        "classes": np.int64(2),
        "mean": np.array([0.0, 1.0, 2.0]),
        "std": torch.tensor([1.0, 1.0, 4.0], requires_grad=True),
    }
    dataset = load_dataset(of_this_module(monkeypatch, lambda: flowers(**changes)))
    assert (dataset.input_shape, dataset.classes) == ((3,), 2)
    assert dataset.train_labels.tolist() == [1, 0] * 4
    inputs = dataset.inputs(dataset.train_features)
    assert inputs[1].tolist() == [1.5, 1.0, 0.125] and not inputs.requires_grad
    assert len(dataset_digest(dataset)) == 64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 3, "must be a shufl.Dataset or return one, got int"),
        (lambda: 1 / 0, r"could not be loaded: ZeroDivisionError \(test_data"),
        (lambda needed: None, "could not be loaded: .* missing 1 required positional argument"),
        (sys.exit, r"could not be loaded: it calls sys.exit\(None\)"),
    ],
)
def test_what_makes_no_dataset_says_why(monkeypatch, make, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(of_this_module(monkeypatch, make))


def test_a_digest_tells_datasets_apart():
    same, other = flowers(), flowers(train_features=torch.arange(24.0).reshape(8, 3) + 1e-6)
    assert dataset_digest(flowers()) == dataset_digest(same) != dataset_digest(other)


def dealt_to(labels, owners, users, scheme, seed, **more):
    return deal(labels, owners, Data(dataset="digits", users=users, partition=scheme, **more), seed)


def rows_of(partition, users):
    """Every user's records."""
    return [partition.rows(np.array([user])) for user in range(users)]


DEALT = ["iid", "by-label", "dirichlet"]


@pytest.mark.parametrize("scheme", DEALT)
@pytest.mark.parametrize("users", [1, 7, 50, 501])
def test_every_record_is_dealt_once_in_shares_that_hardly_differ(scheme, users):
    labels = np.arange(1003) % 10
    dealt = dealt_to(labels, None, users, scheme, seed=1)
    rows = rows_of(dealt, users)
    assert np.sort(np.concatenate(rows)).tolist() == list(range(1003))
    assert np.ptp(list(map(len, rows))) <= 2
    everybody = np.arange(users)
    assert dealt.sizes(everybody).tolist() == list(map(len, rows))
    assert dealt.rows(everybody[::-1]).tolist() == np.concatenate(rows[::-1]).tolist()
    assert (dealt.index == dealt_to(labels, None, users, scheme, seed=1).index).all()
    assert (dealt.index != dealt_to(labels, None, users, scheme, seed=2).index).any()


OWNERS = ["b", "a", "b", ("a", 1), "a", "b", "c"]
NUMBERS = np.array([0, 1, 0, 2, 1, 0, 3])
"""The same, numbered."""


@pytest.mark.parametrize("owners", [OWNERS, NUMBERS + 5, torch.from_numpy(7 - NUMBERS)])
def test_records_belong_to_those_whom_the_data_name(owners, monkeypatch):
    given = flowers(train_features=torch.rand(7, 3), train_labels=torch.zeros(7).long())
    loaded = load_dataset(of_this_module(monkeypatch, lambda: replace(given, users=owners)))
    assert loaded.users.tolist() == NUMBERS.tolist()
    natural = dealt_to(loaded.train_labels.numpy(), NUMBERS, 4, "natural", seed=1)
    assert list(map(list, rows_of(natural, 4))) == [[0, 2, 5], [1, 4], [3], [6]]
    told = "4 users by column it, 1 to 3 records each (median 2), 7 in all"
    assert natural.told("by column it") == told
    chosen = {
        tuple(map(tuple, rows_of(dealt_to(NUMBERS, NUMBERS, 2, "natural", seed), 2)))
        for seed in range(40)
    }
    assert dealt_to(NUMBERS, NUMBERS, 2, "natural", 0).told("").endswith(" more are left out)")
    assert len(chosen) == 6  # every pair of the four, each with all its records
    again = dealt_to(NUMBERS, NUMBERS, 10, "repeated", seed=1)
    assert sorted(map(len, rows_of(again, 4))) == [1, 1, 2, 3]
    assert list(map(list, rows_of(again, 10)))[4:8] == list(map(list, rows_of(again, 4)))
    assert again.told("").endswith("7 in all, each held by up to 3 users")


@pytest.mark.parametrize(
    ("users", "message"),
    [
        (["a"] * 6, "one entry of users for each of 7 training records, got 6"),
        ([1, float("nan")] * 3 + [1], "got no id at 3 of 7 records, first at record 2"),
    ],
)
def test_records_without_an_owner_are_refused(users, message, monkeypatch):
    given = flowers(train_features=torch.rand(7, 3), train_labels=torch.zeros(7).long())
    with pytest.raises(ConfigError, match=message):
        load_dataset(of_this_module(monkeypatch, lambda: replace(given, users=users)))


@pytest.mark.parametrize("scheme", ["natural", "repeated", *DEALT])
def test_of_a_user_with_more_records_so_many_are_used_and_always_the_same(scheme):
    owners = np.repeat(np.arange(30), np.arange(30) + 1)
    args = owners % 10, owners, 30, scheme
    everything, some = (dealt_to(*args, seed=3, most_records=most) for most in (None, 9))
    for all_of, used in zip(rows_of(everything, 30), rows_of(some, 30), strict=True):
        assert len(used) == min(len(all_of), 9) and set(used) <= set(all_of)
    assert (some.index == dealt_to(*args, seed=3, most_records=9).index).all()
    assert some.most_records == 9
    if scheme == "natural":  # not the first ones
        assert (np.concatenate([row[:9] for row in rows_of(everything, 30)]) != some.index).any()


def test_skewed_schemes_are_skewed():
    labels = np.arange(5000) % 10

    def labels_per_user(scheme):
        rows = rows_of(dealt_to(labels, None, 50, scheme, seed=1, concentration=0.1), 50)
        return np.mean([len(np.unique(labels[row])) for row in rows])

    assert labels_per_user("iid") > 9.5
    assert labels_per_user("by-label") <= 2.5
    assert labels_per_user("dirichlet") < 6


@pytest.mark.parametrize(
    ("users", "owners", "scheme", "message"),
    [
        (11, None, "iid", r"users must lie in \[1, 7\]"),
        (4, None, "by-label", r"users must lie in \[1, 3\] .* under by-label"),
        (5, None, "natural", "needs a dataset that says whose each record is"),
        (5, NUMBERS, "natural", r"users must lie in \[1, 4\].*repeated.*got 5"),
    ],
)
def test_too_many_users_for_the_records(users, owners, scheme, message):
    with pytest.raises(ConfigError, match=message):
        dealt_to(np.zeros(7), owners, users, scheme, seed=0)


def test_the_mnist_network_has_the_published_size():
    model = ModelMaker("small-cnn", Form((1, 28, 28), 10), seed=0)()
    assert sum(parameter.numel() for parameter in model.parameters()) == 26_010


def test_initial_parameters_depend_on_the_seed_only():
    torch.manual_seed(99)
    form = Form((1, 8, 8), 10)
    first, again, other = (ModelMaker("mlp", form, seed)() for seed in (1, 1, 2))
    assert torch.equal(first[1].weight, again[1].weight)
    assert not torch.equal(first[1].weight, other[1].weight)


def custom_net(input_shape, classes, width=5):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))


class net_that_gives_pairs(nn.Linear):
    def __init__(self, input_shape, classes):
        super().__init__(64, classes)

    def forward(self, records):
        return super().forward(records.flatten(1)), None


def net_with_batch_norm(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))


class NetWithMemory(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, records):
        if self.training:
            self.seen += records.sum()
        return self.linear(records.flatten(1))


class NetThatFailsInTraining(NetWithMemory):
    def forward(self, records):
        assert not self.training, "it fails"
        return super().forward(records)


def nothing_to_train(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(classes))


class HalfPrecisionNet(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes, dtype=torch.bfloat16)

    def forward(self, records):
        return self.linear(records.flatten(1).to(torch.bfloat16)).float()


def net_that_starts_at(input_shape, classes, value):
    model = custom_net(input_shape, classes)
    nn.init.constant_(model[3].bias, value)
    return model


def net_that_exits(input_shape, classes):
    sys.exit(0)


def net_of_wrong_width(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes + 1))


FORM = Form((1, 8, 8), 10)


def built(name, **options):
    """A model of this file."""
    return ModelMaker(f"{__name__}:{name}", FORM, 0, options)()


def test_any_module_and_callable_is_a_model():
    assert built("custom_net", width=7)[1].out_features == 7


class NetWithBuffer(nn.Module):
    def __init__(self, input_shape, classes, value):
        super().__init__()
        self.linear = nn.Linear(64, classes)
        self.register_buffer("mask", value)

    def forward(self, records):
        return self.linear(records.flatten(1))


class NetWithFrozen(NetWithBuffer):
    def __init__(self, input_shape, classes, value):
        super().__init__(input_shape, classes, torch.ones(1))
        self.frozen = nn.Parameter(value, requires_grad=False)


FORBIDDEN = {
    "sparse": torch.eye(3).to_sparse(),
    "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "meta": torch.ones(2, device="meta"),
    "nested": torch.nested.nested_tensor([torch.ones(2)]),
}
FORBIDDEN_BUFFERS = FORBIDDEN | {
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "float8": torch.ones(2, dtype=torch.float8_e4m3fn),
    "expanded": torch.ones(1).expand(3),
    "csr": torch.eye(3).to_sparse_csr(),
}


class Subclass(torch.Tensor):
    """Cannot be copied."""


AS_IT_IS = torch.ones(2).as_subclass(Subclass)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NetWithMemory", {}, "changes its buffer seen in training"),
        ("NetThatFailsInTraining", {}, "could not be tried on two records: it fails"),
        ("nothing_to_train", {}, "has no parameters to train"),
        ("HalfPrecisionNet", {}, "keeps linear.weight as torch.bfloat16: keep it as"),
        ("net_that_exits", {}, r"could not be built .*: it calls sys.exit\(0\)"),
        ("net_of_wrong_width", {}, "must give 10 scores a record, got shape"),
        ("net_with_batch_norm", {}, "has batch norm .* freeze its parameters .* or use group"),
        ("net_that_gives_pairs", {}, "tensor named logits, for .* got tuple"),
        *(("NetWithBuffer", {"value": value}, "must keep mask as .*dense.* on the CPU")
          for value in FORBIDDEN_BUFFERS.values()),
        *(("NetWithFrozen", {"value": value}, "must keep frozen as .*dense.* on the CPU")
          for value in FORBIDDEN.values()),
        ("NetWithBuffer", {"value": AS_IT_IS}, "NetWithBuffer cannot be copied: "),
        ("NetWithFrozen", {"value": AS_IT_IS}, "NetWithFrozen cannot be copied: "),
        *(("net_that_starts_at", {"value": value}, "with finite numbers, got others in 3")
          for value in (torch.nan, torch.inf)),
    ],
)  # fmt: skip
def test_models_that_cannot_be_used_say_why(name, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        built(name, **options)
    assert "\n" not in str(error.value)


def test_batch_norm_of_frozen_parameters_uses_its_statistics_in_training_too():
    model, records = ModelMaker("task_world:Normed", Form((3,), 2), 0)(), torch.randn(5, 3)
    copied = copy.deepcopy(model).train()
    assert torch.equal(copied(records)["logits"], model.eval()(records)["logits"])
    assert copied.layers[1].train() is copied.layers[1] is not model.layers[1]


def with_attribute(input_shape, classes, value):
    model = NetWithBuffer(input_shape, classes, torch.ones(1))
    model.shape_alone = value
    return model


def test_a_tensor_without_numbers_is_no_hindrance_where_none_are_sent():
    assert built("with_attribute", value=torch.ones(2, device="meta")).shape_alone.is_meta


@pytest.mark.parametrize("name", ["NetWithBuffer", "NetWithFrozen"])
@pytest.mark.parametrize("part", [lambda each: each, torch.imag], ids=["conjugate", "negative"])
def test_a_view_that_is_not_yet_computed_is_what_it_stands_for(name, part):
    """What is sent, digested, loaded and kept is as that of its copy."""
    given = part(torch.tensor([1.0 + 2.0j, 3.0]).conj())
    values = given, torch.tensor(given.tolist(), dtype=given.dtype)
    models = [built(name, value=value) for value in values]
    digests = {(model_digest(sent(each)), frozen_digest(each)) for each in models}
    assert given.is_conj() or given.is_neg()
    assert len(digests) == 1
    load_sent(models[0], ArrayRecord(sent(models[1])).to_torch_state_dict())
    assert model_digest(sent(models[0])) == model_digest(sent(models[1]))


@pytest.mark.parametrize("value", [torch.tensor([torch.nan, -torch.inf]), torch.ones(0)])
def test_other_buffers_are_taken(value):
    assert model_digest(built("NetWithBuffer", value=value).state_dict())


def records_of(dataset, users, scheme):
    return load_users(Data(dataset=dataset, users=users, partition=scheme), seed=1)


def test_repeated_records_are_held_by_equally_many_users_and_users_take_no_memory():
    everybody = records_of("digits", 10**12, "repeated")
    features, labels, sizes = everybody.together(np.arange(3_000))
    assert torch.equal(features[:1_437], features[1_437:2_874]) and (sizes == 1).all()
    assert len(features.unique(dim=0)) == 1_437
    assert features.shape == (3_000, 1, 8, 8) and labels.shape == (3_000,)
    assert torch.equal(everybody(10**12 - 1)[0], features[[(10**12 - 1) % 1_437]])
    few = records_of("digits", 7, "repeated")
    assert torch.equal(few.together(np.arange(7))[0], features[:7])


@pytest.mark.parametrize("scheme", ["natural", "repeated"])
@pytest.mark.parametrize("bounds", [(0, 5), (3, 11), (10, 30), (25, 400)])
def test_the_records_of_some_users_are_those_they_have_among_all(scheme, bounds, monkeypatch):
    owners = np.repeat(np.arange(30), 1 + np.arange(30) % 7)
    features, labels = torch.rand(len(owners), 3), torch.from_numpy(owners % 2)
    dataset = flowers(train_features=features, train_labels=labels, users=owners)
    name = of_this_module(monkeypatch, lambda: dataset)
    users, (first, last) = (30 if scheme == "natural" else 1000), bounds
    last = min(last, users)
    everybody = records_of(name, users, scheme)
    some, ids = everybody.of(first, last), np.arange(first, last)
    for mine, theirs in zip(some.together(ids), everybody.together(ids), strict=True):
        assert (mine == theirs).all()
    before = everybody.before(ids)
    assert (some.before(ids) == before).all()
    assert (np.diff(before) == everybody.sizes(ids)[:-1]).all()
    for user, place in zip(ids.tolist(), before.tolist(), strict=True):
        assert everybody.partition.user_at(place) == user
        assert everybody.partition.user_at(place + 1) == user + 1
    for outside in (first - 1, last):
        with pytest.raises(IndexError, match="users must lie in"):
            some(outside)
