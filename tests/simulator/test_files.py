"""Records of a CSV or Parquet file: whose they are, what is learnt, what is refused."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest
import tomli_w
import torch
from pyarrow import csv, parquet

import shufl
from shufl.learning.config import dumps, load
from shufl.learning.data.files import RecordFile
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare

PATIENTS, MEAN, STD = 40, [50.0, 25.0], [10.0, 4.0]


def visits():
    """Patients come 1 to 13 times; who is old and heavy is ill."""
    random = np.random.default_rng(0)
    times = 1 + np.arange(PATIENTS) % 13
    patient = random.permutation(np.repeat([f"p-{n}" for n in range(PATIENTS)], times))
    age, weight = (random.normal(*each, size=len(patient)) for each in zip(MEAN, STD, strict=True))
    ill = (age - MEAN[0]) / STD[0] + (weight - MEAN[1]) / STD[1] > 0
    return {"patient": patient, "age": age, "weight": weight, "ill": ill, "days": 0.1 * age}


COLUMNS = {
    "file": "visits.csv", "user": "patient", "label": "ill", "features": ["age", "weight"],
    "classes": 2, "mean": MEAN, "std": STD,
}  # fmt: skip
PRIVACY = {
    "check_in_rate": 0.8, "clip_norm": 1.0, "noise_multiplier": 0.6, "rounds": 8, "cover": True,
    "target_epsilon": 100.0, "accountant": "blanket", "shuffler_blankets": 20.0, "delta": 1e-5,
    "adjacency": "replace", "minimum_batch": 1,
}  # fmt: skip


def save(table, path):
    (parquet.write_table if path.suffix == ".parquet" else csv.write_csv)(table, path)


def write(folder, table=None, **changes):
    """A configuration and its file; its path."""
    save(pa.table(visits() | (table or {})), folder / (COLUMNS | changes)["file"])
    config = {
        "name": "visits",
        "privacy": PRIVACY,
        "data": {"dataset": COLUMNS | changes},
        "model": {"name": "logistic-regression"},
        "training": {"learning_rate": 1.0},
        "simulation": {"engine": "vectorised"},
    }
    path = folder / "visits.toml"
    path.write_text(tomli_w.dumps(config))
    return path


@pytest.mark.parametrize("name", ["visits.csv", "visits.parquet"])
def test_a_run_learns_from_a_file_wherever_it_is_started(name, tmp_path, monkeypatch):
    path = write(tmp_path, file=name)
    monkeypatch.chdir(os.sep)
    run = shufl.run(path, runs=tmp_path / "runs", progress=False)
    assert (run.score_name, run.plan.users) == ("accuracy", 32)  # eight are for testing
    assert run.score > 0.8
    again = shufl.run(run.folder / "config.toml", runs=tmp_path / "runs", progress=False)
    assert again.score == run.score


def test_whole_users_are_for_testing_or_records_of_everybody(tmp_path):
    given, raw = visits(), {"mean": [0.0, 0.0], "std": [1.0, 1.0]}
    records = len(given["patient"])
    for test_of, users in (("users", 32), ("records", None)):
        data = prepare(load(str(write(tmp_path, test_of=test_of, **raw)))).dataset
        assert len(data.train_labels) + len(data.test_labels) == records
        everything = torch.cat([data.train_features, data.test_features])[:, 0].sort().values
        assert everything.tolist() == sorted(np.float32(given["age"]).tolist())
        if users:
            assert data.users.max() == users - 1
        else:
            assert len(data.test_labels) == round(0.2 * records)
    age = {float(np.float32(a)): p for a, p in zip(given["age"], given["patient"], strict=True)}
    data = prepare(load(str(write(tmp_path, **raw)))).dataset
    owner = [age[a] for a in data.train_features[:, 0].tolist()]
    tested = {age[a] for a in data.test_features[:, 0].tolist()}
    assert len(tested) == 8 and not tested & set(owner)
    names = list(dict.fromkeys(owner))
    assert [names[number] for number in data.users.tolist()] == owner


def test_columns_may_be_numbers_to_learn_and_ids(tmp_path):
    about = {"label": ["age", "days"], "features": ["weight"], "mean": [25.0], "std": [4.0]}
    config = load(str(write(tmp_path, **about)), ["data.dataset.classes="])
    experiment = prepare(config)
    assert experiment.form.task == "regression" and experiment.form.label_shape == (2,)
    torch.testing.assert_close(
        experiment.dataset.train_labels[:, 1], 0.1 * experiment.dataset.train_labels[:, 0]
    )
    assert load(dumps_to(tmp_path, config)) == config
    ids = {"features": ["code"], "input_type": "int64"}
    table = {"code": np.arange(len(visits()["age"])) % 2**40 + 2**30}
    path = write(tmp_path, table=table, **ids)
    data = load(str(path), ["data.dataset.mean=", "data.dataset.std="]).data.dataset.load()
    assert data.train_features.dtype == torch.int64 and data.train_features.min() >= 2**30


def test_users_are_text_so_that_007_is_not_7(tmp_path):
    lines = ["user,x,y", "007,1,2", "7,2,3", "7,3,4", "18446744073709551617,4,5"]
    lines.append("18446744073709551618,5,6")
    (tmp_path / "ids.csv").write_text("\n".join(lines) + "\n")
    given = {"file": str(tmp_path / "ids.csv"), "user": "user", "label": "y"}
    _, _, users = RecordFile.checked("it", given).records_in(tmp_path / "ids.csv")
    assert users.tolist() == [0, 1, 1, 2, 3]


def dumps_to(folder, config):
    (folder / "again.toml").write_text(dumps(config))
    return str(folder / "again.toml")


def missing(values, place=3):
    return pa.array([None if number == place else value for number, value in enumerate(values)])


@pytest.mark.parametrize(
    ("changes", "table", "message"),
    [
        ({"user": "patent"}, {},
         "line 1 must name a column patent, got 5 other columns; did you mean patient?"),
        ({"features": ["age", "city"]}, {"city": ["Bath"] * len(visits()["age"])},
         "column city must be whole numbers or floats"),
        ({}, {"age": missing(visits()["age"])},
         "column age must have no empty cells, got some at 1 of 274 lines, first at line 5: "
         "missing.age fills them, drop leaves such records out"),
        ({}, {"patient": missing(visits()["patient"])},
         "column patient must say whose each record is, got no id at 1 of"),
        ({"label": "days"}, {},
         "column days must be whole numbers, got others at 274 of 274 lines, first at line 2"),
        ({"classes": 1}, {}, "column ill must be from 0 to 0, got others at 130 of 274 lines"),
        ({"mean": [1.0]}, {}, "data.dataset: mean and std must both be there, of equal length"),
        ({"mean": [1.0], "std": [1.0]}, {}, "mean and std must have 2 numbers, one for each"),
        ({"std": [1.0, 0.0]}, {}, "data.dataset: std must be above 0, got 0.0"),
        ({"features": ["age", "ill"]}, {}, "must be different columns, got ill twice"),
        ({"test": 0.001}, {}, "must leave users for both training and testing, got 0.001 of 40"),
        ({"test": 1.5}, {}, "data.dataset: test must be a number in (0, 1), got 1.5"),
        ({"lable": "ill"}, {}, "data.dataset: unknown key lable; did you mean label?"),
        ({}, {"age": np.full(len(visits()["age"]), np.nan)}, "column age must have no empty cells"),
        ({}, {"age": np.full(len(visits()["age"]), 2**30)}, "must be whole numbers of at most"),
    ],
)  # fmt: skip
def test_what_is_no_use_is_one_line(changes, table, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        prepare(load(str(write(tmp_path, table=table, **changes))))
    assert message in str(error.value) and "\n" not in str(error.value)


N = 10
GIVEN = {"u": [f"secret-{n}" for n in range(N)], "x": np.arange(N) + 0.5, "y": np.arange(N) % 2}
AS_THEY_ARE = pa.array([b"\xff"] * N, pa.binary())


def read(path, **changes):
    about = {"file": str(path), "user": "u", "label": "y", "classes": 2} | changes
    return RecordFile.checked("it", about).records_in(path)


@pytest.mark.parametrize("column", ["u", "x", "y"])
@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.array([[name] for name in GIVEN["u"]]), "list"),
        (pa.array(10**18 + np.arange(N), pa.timestamp("ns")), "timestamp"),
        (pa.array(np.arange(N), pa.timestamp("us", "Mars/Phobos")), "timestamp"),
        (pa.array(1 + np.arange(N), pa.time64("ns")), "time64"),
        (pa.array(1 + np.arange(N), pa.duration("ns")), "duration"),
        (pa.array([2**30] * N, pa.int32()).cast(pa.date32()), "date32"),
        (pa.StructArray.from_arrays([pa.array(GIVEN["u"])] * 2, ["a", "a"]), "struct"),
        (pa.array([[(name, 1)] for name in GIVEN["u"]], pa.map_(pa.string(), pa.int8())), "map"),
        (pa.array(np.arange(N)).cast(pa.decimal128(21, 2)), "decimal128"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_column_that_is_neither_ids_nor_numbers_is_one_line(column, given, kind, tmp_path):
    path = tmp_path / "f.parquet"
    parquet.write_table(pa.table(GIVEN | {column: given}), path)
    with pytest.raises(ConfigError) as error:
        read(path)
    allowed = {"u": "text, bytes or whole numbers", "x": "whole numbers or floats"}
    said = f"column {column} must be {allowed.get(column, 'whole numbers')}, got {kind}"
    assert str(error.value).partition(" at 10 of 10 records")[0] == f"f.parquet: {said}"


@pytest.mark.parametrize("name", ["f.parquet", "f.csv"])
def test_no_two_columns_that_are_used_have_one_name(name, tmp_path):
    arrays = [pa.array(GIVEN[each]) for each in ("u", "x", "x", "y")]
    for names in (["u", "x", "x", "y"], ["u", "u", "x", "y"]):
        table = pa.Table.from_arrays(arrays, names)
        save(table, tmp_path / name)
        with pytest.raises(
            ConfigError, match=rf"^{name}: only one column may be called {names[1]}"
        ):
            read(tmp_path / name)
    table = pa.Table.from_arrays([*arrays, *arrays[1:3]], ["u", "x", "w", "y", "z", "z"])
    save(table, tmp_path / name)
    features, _, owners = read(tmp_path / name, features=["x"])
    assert owners.tolist() == list(range(N)) and features[:, 0].tolist() == GIVEN["x"].tolist()


ROWS = "".join(f"secret-{n},{n}.5,{n % 2}\n" for n in range(N))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"u,x,y,\n{ROWS}".replace("\n", ",\n").replace(",,", ","), "column 4 must have a name"),
        (f"u,x,y\n{ROWS}".replace("5,", "5,,"), "line 2 has 4 fields, line 1 has 3"),
        (
            f"u,x,y\n{ROWS}".encode("utf-16"),
            "a workbook must be saved as CSV), or not in UTF-8, or ",
        ),
        (f"u,x,y\n{'a' * 2**21},1,0\n{ROWS}", "or a line is over 1 MiB long"),
        (f'u,x,y\n"a\nb",1,0\n{ROWS},\n', "record 12 has 2 fields, line 1 has 3"),
    ],
)
def test_what_is_wrong_with_lines_is_said_as_it_is(content, message, tmp_path):
    path = tmp_path / "f.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        read(path)
    assert message in str(error.value) and "secret" not in str(error.value)


def test_text_may_have_line_ends_wherever_a_block_ends(tmp_path):
    names = [f"{'a' * 900}\n{number}" for number in range(3000)]
    csv.write_csv(pa.table({"u": names, "x": [1.5] * 3000, "y": [0] * 3000}), tmp_path / "f.csv")
    assert read(tmp_path / "f.csv")[2].tolist() == list(range(3000))


def test_a_parquet_file_is_one_whatever_its_name_and_folder(tmp_path):
    folder = tmp_path / "u=1"
    folder.mkdir()
    parquet.write_table(pa.table(GIVEN), folder / "f.pq")
    assert read(folder / "f.pq")[2].tolist() == list(range(N))
    parquet.write_table(pa.table(GIVEN).drop_columns("u"), folder / "f.parquet")
    with pytest.raises(ConfigError, match=r"its schema must name a column u, got 2 other columns$"):
        read(folder / "f.parquet")
    broken = pa.Array.from_buffers(pa.string(), N, AS_THEY_ARE.buffers())
    parquet.write_table(pa.table(GIVEN | {"u": broken}), folder / "f.parquet")
    with pytest.raises(ConfigError, match=r"cannot be read as CSV or Parquet: .* not in UTF-8"):
        read(folder / "f.parquet")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("", "visits.csv"),
        ("Unnamed: 0", "visits.csv"),
        ("...1", "visits.csv"),
        ("__index_level_0__", "visits.parquet"),
        ("visit", "visits.parquet"),
    ],
)
def test_the_index_of_a_table_is_no_feature_unless_it_is_named(name, file, tmp_path):
    index = {name: np.arange(len(visits()["age"]))}
    columns = {
        key: value for key, value in COLUMNS.items() if key not in ("features", "mean", "std")
    }
    table = pa.table(index | visits())
    if file.endswith("parquet"):  # as pandas says it
        said = {"index_columns": [name], "columns": [], "column_indexes": []}
        table = table.replace_schema_metadata({"pandas": json.dumps(said)})
    save(table, tmp_path / file)
    given = RecordFile.checked("it", columns | {"file": str(tmp_path / file)})
    with pytest.raises(ConfigError) as error:
        given.load()
    line = f'{file}: column 1, "{name}", is a table\'s index, not a feature: write the file'
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    if name:
        named = given.model_copy(update={"features": (name, "age")})
        assert named.load().input_shape == (2,)


@pytest.mark.parametrize("said", [b"{", b"[1]", b'{"index_columns": null}'])
def test_what_another_program_wrote_as_pandas_own_is_no_index(said, tmp_path):
    table = pa.table(GIVEN).replace_schema_metadata({"pandas": said})
    parquet.write_table(table, tmp_path / "f.parquet")
    assert read(tmp_path / "f.parquet")[2].tolist() == list(range(N))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"a,b\n1\n1,2,3\n", None])
def test_a_file_that_cannot_be_read_is_one_line(content, tmp_path):
    path = write(tmp_path)
    (tmp_path / "visits.csv").unlink()
    if content is not None:
        (tmp_path / "visits.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=r"visits.csv cannot be read as CSV or Parq") as error:
        prepare(load(str(path)))
    assert "\n" not in str(error.value)
