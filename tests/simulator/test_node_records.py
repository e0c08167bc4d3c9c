"""What a deployed node takes as its users' records: nothing that a cast would change."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from shufl.deploy.node import _check_records, _from_folder, _mapped
from shufl.learning.tasks import Form
from shufl.protocol.validation import ConfigError

SITE = Form((3,), 4)
TYPES = "float32", "int64"
FEATURES, LABELS = np.ones((2, 3)), np.array([0, 3])


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.array([[1, np.nan, 2], [1, 2, 3]]), LABELS, "must have finite features"),
        (np.full((2, 3), 1e300), LABELS, "must have finite features"),
        (np.full((2, 3), 2**24 + 1), LABELS, "features must be whole numbers of at most 16777216"),
        (FEATURES.astype(bool), LABELS, "features must be whole numbers or floats, got bool"),
        (FEATURES.astype(str), LABELS, "features must be whole numbers or floats, got <U"),
        (np.array([[1, None, 2]] * 2, object), LABELS,
         "0.npz must be made by np.savez, of arrays features and labels of numbers"),
        (FEATURES.astype("f4,f4"), LABELS, "features must be whole numbers or floats, got"),
        (FEATURES, np.array([1.0, 2.0]), "labels must be whole numbers, got float64"),
        (FEATURES, np.array([True, False]), "labels must be whole numbers, got bool"),
        (FEATURES, np.array(["cat", "dog"]), "labels must be whole numbers, got <U3"),
        (FEATURES, np.eye(4, dtype=int)[:2], r"labels of shape \(r,\), r at least 1, got"),
        (FEATURES, np.array([1, 4]), "must lie in 0 to 3, got others at 1 of 2 records, first at"),
        (FEATURES, np.array([-1, 2], np.int8), "must lie in 0 to 3, got others at 1 of 2"),
        (FEATURES, np.array([2**63, 2], np.uint64), "labels must be whole numbers of at most"),
        (FEATURES, np.array([2]), r"got \(2, 3\) and \(1,\)"),
        (np.ones((0, 3)), np.zeros(0, int), r"r at least 1, got \(0, 3\) and \(0,\)"),
    ],
)  # fmt: skip
def test_records_of_a_folder_are_checked_before_they_are_cast(tmp_path, features, labels, message):
    np.savez(tmp_path / "0.npz", features=features, labels=labels)
    with pytest.raises(ConfigError, match=message) as error:
        _check_records(_from_folder(tmp_path, TYPES), 0, SITE)
    assert "of user 0 " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["f8", "f4", "f2", ">f8", "u1", "i2", "i8", "u8"])
def test_numbers_of_any_type_that_the_cast_keeps_are_taken(tmp_path, kind):
    labels = LABELS.astype("i8" if "f" in kind else kind)
    np.savez(tmp_path / "0.npz", features=FEATURES.astype(kind) * 3, labels=labels)
    read = _from_folder(tmp_path, TYPES)
    _check_records(read, 0, SITE)
    found = read(0)
    assert torch.equal(found[0], torch.full((2, 3), 3.0)) and found[1].tolist() == [0, 3]
    assert [each.dtype for each in found] == [torch.float32, torch.int64]


GIVEN, NAMED = torch.ones(2, 3), torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (GIVEN.double(), NAMED, "features as a dense tensor of float32 .* got float64"),
        (GIVEN.numpy(), NAMED, "got ndarray"),
        (GIVEN.to_sparse(), NAMED, "got float32, sparse_coo, on cpu"),
        (GIVEN, NAMED.float(), "labels as a dense tensor of int64 .* got float32"),
        (GIVEN / 0, NAMED, "must have finite features, got NaN or infinity"),
        (GIVEN, NAMED + 1, "must lie in 0 to 3, got others at 1 of 2 records, first at record 2"),
    ],
)
def test_records_of_a_callable_are_checked_whatever_it_returns(features, labels, message):
    with pytest.raises(ConfigError, match=message):
        _check_records(lambda user: (features, labels), 0, SITE)


def test_records_are_checked_before_they_are_mapped(tmp_path, monkeypatch):
    """Else a map may make good numbers of bad ones."""
    (tmp_path / "a_map.py").write_text(
        "def of(records):\n    return records.nan_to_num().float()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    records = _mapped(lambda: lambda user: (user[0], NAMED), "a_map:of", "int64")
    assert torch.equal(records([GIVEN])[0], GIVEN)
    for wrong in (GIVEN * torch.nan, GIVEN.long(), GIVEN.numpy()):
        with pytest.raises(ValueError, match="they must have "):
            records([wrong])


@pytest.mark.slow
def test_a_node_with_a_file_loads_no_code_that_makes_deals_or_maps_datasets(tmp_path):
    (tmp_path / "visits.csv").write_text("who,x,y\nann,1.5,0\nbob,2.5,1\n")
    code = """
import sys
from pathlib import Path
from shufl.deploy.node import RecordFile, _from_file
columns = RecordFile(file="visits.csv", user="who", label="y", classes=2)
(feature,), label = _from_file(Path("visits.csv"), columns, 2)(1)
print(float(feature), int(label))
print([name for name in sys.modules if name.startswith("shufl.learning.data.")])
print(sorted({"server", "results", "simulator"}.intersection(
    name.split(".")[1] for name in sys.modules if name.startswith("shufl."))))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    names = [f"shufl.learning.data.{name}" for name in ("person_ids", "files", "columns")]
    said = f"2.5 1\n{names}\n[]\n"
    assert ended.stdout == said, ended.stderr
