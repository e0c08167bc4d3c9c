"""Records as spreadsheets export them: what each key of the table makes of a cell, or refuses."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from run_world import invoke, refused
from shufl.learning.config import dumps, load
from shufl.learning.data.files import RecordFile
from shufl.protocol.validation import ConfigError
from shufl.simulator.histogram import count_column

ROWS = """who;age;size;ward;seen;ill
ann;50;1,5;Köln;31.12.2023;1,0
bob;40;2,0;Bonn;02.01.2024;0,0
"""
GERMAN = {
    "separator": ";", "decimal": ",", "encoding": "cp1252", "date_format": "%d.%m.%Y",
    "categories": {"ward": ["Bonn", "Köln"]}, "dates": {"seen": "2024-01-01"},
}  # fmt: skip


def read(folder, content=ROWS, written="cp1252", **changes):
    """Features, labels and owners of a file with these changes to what its table says."""
    path = folder / "f.csv"
    path.write_bytes(content.encode(written))
    given = {"file": str(path), "user": "who", "label": "ill", "classes": 2} | GERMAN | changes
    given = {key: value for key, value in given.items() if value is not None}
    return RecordFile.checked("it", given).records_in(path)


def test_a_german_export_is_read(tmp_path):
    features, labels, owners = read(tmp_path)
    assert features.tolist() == [[50, 1.5, 0, 1, -1], [40, 2.0, 1, 0, 1]]
    assert (labels.tolist(), owners.tolist()) == ([1, 0], [0, 1])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_what_programs_of_windows_write_is_read(tmp_path, encoding):
    known = None if encoding == "utf-8-sig" else encoding
    tabs = ROWS.replace(";", "\t").replace("\n", "\r\n")
    assert read(tmp_path, tabs, encoding, encoding=known, separator="\t")[1].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("changes", "lines", "expected"),
    [
        ({"mean": [40, 1.0, 1], "std": [10, 0.5, 2]}, "", [[1, 1, 0, 1, -1], [0, 2, 1, 0, 0]]),
        ({"missing": {"age": 30}}, "eve;;1;Bonn;01.01.2024;0,0\n", [30, 1, 1, 0, 0]),
        ({"missing": {"ward": "Köln"}}, "eve;1;1;;01.01.2024;0,0\n", [1, 1, 0, 1, 0]),
        ({"missing": {"seen": -5}}, "eve;1;1;Bonn;NA;0,0\n", [1, 1, 1, 0, -5]),
        ({"missing": {"age": 9}, "missing_texts": ["-"]}, "eve;-;1;Bonn;01.01.2024;0,0\n",
         [9, 1, 1, 0, 0]),
        ({"other": ["ward"]}, "eve;1;1;Ulm;01.01.2024;0,0\n", [1, 1, 0, 0, 1, 0]),
        ({"categories": {"ward": ["Bonn", "Köln", ""]}}, "eve;1;1;;01.01.2024;0,0\n",
         [1, 1, 0, 0, 1, 0]),
        ({"categories": {"ward": ["Bonn", "Köln", "NA"]}}, "eve;1;1;NA;01.01.2024;0,0\n",
         [1, 1, 0, 0, 1, 0]),
        ({"date_format": "%d.%m.%Y %H:%M", "missing": {"seen": 0}, "drop": [],
          "dates": {"seen": datetime.date(2024, 1, 1)}, "categories": {"ward": ["Bonn", "Köln"]}},
         None, [1, 1, 1, 0, 1.5]),
    ],
)  # fmt: skip
def test_a_cell_becomes_what_the_table_says(tmp_path, changes, lines, expected):
    content = f"{ROWS}{lines}" if lines is not None else (
        "who;age;size;ward;seen;ill\neve;1;1;Bonn;02.01.2024 12:00;0,0\n"
    )  # fmt: skip
    features = read(tmp_path, content, **changes)[0].tolist()
    assert (features if isinstance(expected[0], list) else features[-1]) == expected


def test_whether_a_record_is_left_out_depends_on_that_record_alone(tmp_path):
    """And what is wrong with it is no mistake: a sheet may end in empty rows."""
    rest = "eve;;x;Ulm;never;7\nbob;1;1;Bonn;03.01.2024;1\n;;;;;\n"
    features, labels, owners = read(tmp_path, ROWS + rest, drop=["age", "who"])
    assert features[:2].tolist() == read(tmp_path)[0].tolist()
    assert (labels.tolist(), owners.tolist()) == ([1, 0, 1], [0, 1, 1])


def test_a_label_may_be_of_categories(tmp_path):
    said = ROWS.replace("1,0\n", "yes\n").replace("0,0\n", "no\n")
    lists = GERMAN["categories"] | {"ill": ["yes", "no"]}
    assert read(tmp_path, said, classes=None, categories=lists)[1].tolist() == [0, 1]


def test_with_ids_a_category_is_its_place(tmp_path):
    features, _, _ = read(tmp_path, ROWS.replace("1,5", "1"), input_type="int64")
    assert features.tolist() == [[50, 1, 1, -1], [40, 2, 0, 1]]


def test_what_a_table_says_comes_back_from_a_run_folder(tmp_path):
    path = tmp_path / "f.csv"
    path.write_bytes(ROWS.encode("cp1252"))
    about = {"file": str(path), "user": "who", "label": "ill", "missing": {"age": 1}} | GERMAN
    config = load("quickstart", {"data": {"dataset": about}})
    (tmp_path / "again.toml").write_text(dumps(config), encoding="utf-8")
    again = load(str(tmp_path / "again.toml"))
    assert again == config and hash(again.data.dataset) == hash(config.data.dataset)
    assert again.data.dataset.dates == {"seen": datetime.date(2024, 1, 1)}


def test_a_parquet_file_has_types_of_its_own(tmp_path):
    path = tmp_path / "f.parquet"
    days = [datetime.datetime(2024, 1, 2, 12), None]
    columns = {
        "who": ["ann", "bob"],
        "seen": pa.array(days, pa.timestamp("ns")),
        "ward": pa.array(["Bonn", "Köln"]).dictionary_encode(),
        "code": [1, 7],
        "ill": [1.0, 0.0],
    }
    parquet.write_table(pa.table(columns), path)
    given = {"file": str(path), "user": "who", "label": "ill", "classes": 2} | GERMAN
    lists = {"ward": ["Bonn", "Köln"], "code": ["1", "7"]}
    about = RecordFile.checked("it", given | {"categories": lists, "missing": {"seen": 0.0}})
    features, labels, _ = about.records_in(path)
    assert features.tolist() == [[1.5, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    assert labels.tolist() == [1, 0]


SECRET = "4711"
LINE = f"eve;1;1;Bonn;01.01.2024;{SECRET}\n"


@pytest.mark.parametrize(
    ("changes", "lines", "said"),
    [
        ({"separator": None}, "", "line 2 has 3 fields, line 1 has 1; separator = \";\" would"),
        ({"separator": "|"}, "", "line 1 must name a column who, got 1 other columns; separator ="),
        ({"encoding": None}, "", "not in UTF-8 at 1 of 3 lines, first at line 2: encoding = "),
        ({"encoding": "utf9"}, "", "encoding must be one that Python knows, such as cp1252, got"),
        ({"decimal": None}, "", 'column ill must be whole numbers, got string at 2 of 2 '
         'lines, first at line 2: decimal = "," reads 0,5'),
        ({}, f"eve;{SECRET}.000,5;1;Bonn;01.01.2024;0\n", "column age must be whole numbers or "
         "floats, got string at 1 of 3 lines, first at line 4: write categories.age, dates.age"),
        ({"categories": None}, "", "column ward must be whole numbers or floats, got string at 2"),
        ({"dates": None}, "", "column seen must be whole numbers or floats, got string at 2 of 2"),
        ({"date_format": None}, "", "column seen must be dates like %Y-%m-%d, got others at 2 of"),
        ({}, "eve;1;1;Bonn;31.02.2024;0\n", "must be dates like %d.%m.%Y, got others at 1 of 3 "
         "lines, first at line 4"),
        ({}, f"eve;1;1;{SECRET};01.01.2024;0\n", "column ward must have values spelt as "
         "categories.ward lists them, got others at 1 of 3 lines, first at line 4: list them too"),
        ({"other": ["ward"]}, "eve;1;1;Bonn ;01.01.2024;0\n", "must have values spelt as "),
        ({}, "eve;;1;Bonn;01.01.2024;0\n", "column age must have no empty cells, got some at 1 of "
         "3 lines, first at line 4: missing.age fills them, drop leaves such records out"),
        ({}, "eve;1;1;;01.01.2024;0\n", "column ward must have no empty cells"),
        ({}, LINE, "column ill must be from 0 to 1, got others at 1 of 3 lines, first at line 4"),
        ({}, "eve;1;1;Bonn;01.01.2024;0,5\n", "column ill must be whole numbers, got others at 1"),
        ({}, f'"eve\neve";1;1;Bonn;01.01.2024;0\n{LINE}', "at 1 of 4 records, first at record 4"),
        ({"drop": ["who"]}, "NA;1;1;Bonn;01.01.2024;0\nann ;1;1;Bonn;01.01.2024;0\n",
         "line 5 has 'ann ', which looks like 'ann' at line 2"),
        ({"missing": {"age": "x"}}, "", "missing.age must be a number, or a category (to leave"),
        ({"missing": {"ward": "Ulm"}}, "", "records out, see drop), got 'Ulm'"),
        ({"missing": {"agee": 1}}, "", "missing must be of features and label, got agee"),
        ({"missing": {"who": 1}}, "", "missing must be of features and label, got who"),
        ({"categories": {"ward": ["Bonn", "Bonn "]}}, "", "must be two texts or more, none alike"),
        ({"other": ["age"]}, "", "other must be of columns in categories, got age"),
        ({"categories": {"ill": ["0,0", "1,0", "2"]}}, "", "classes must be 3, the label's"),
        ({"label": ["ill", "ward"]}, "", "label must be a single column to have categories"),
        ({"decimal": ";"}, "", "decimal must be \".\" or \",\", got ';'"),
        ({"separator": ";;"}, "", "separator must be one character, got ';;'"),
        ({"dates": {"seen": "01.01.2024"}}, "", "dates must be a table of a date, such as 2020-01"),
        ({"mean": [1], "std": [1]}, "", "mean and std must have 3 numbers, one for each feature"),
        ({"mean": [1], "std": [1], "input_type": "int64"}, "", "left out with input_type int64"),
    ],
)  # fmt: skip
def test_a_refusal_says_where_and_what_to_write(tmp_path, capfd, changes, lines, said):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, ROWS + lines, **changes)
    told = str(error.value)
    assert said in told and "\n" not in told and SECRET not in told
    assert capfd.readouterr().err == ""


def test_a_workbook_and_a_blank_in_a_name_are_told(tmp_path):
    with pytest.raises(ConfigError, match="a workbook must be saved as CSV"):
        read(tmp_path, "PK\x03\x04\0\0", "latin-1")
    with pytest.raises(
        ConfigError, match=r"a column age, got 6 other columns; did you mean ' age'\?"
    ):
        read(tmp_path, ROWS.replace("age", " age"), features=["age"])


CATEGORIES = '--categories=Bonn,"Köln, west",""'


PLAN = "--column=town --target-epsilon 1 --accountant local --delta 1e-6"


def test_a_histogram_of_an_export_and_of_parquet(tmp_path):
    towns = ["Bonn", "Köln, west", None, "Bonn"]
    who = ["ann", "bob", "cid", "ann"]
    parquet.write_table(pa.table({"town": towns, "who": who}), tmp_path / "f.parquet")
    lines = [f"{one};{town or ''}" for one, town in zip(who, towns, strict=True)]
    (tmp_path / "f.csv").write_bytes("\n".join(["who;town", *lines]).encode("latin-1"))
    for name, form in (("f.parquet", []), ("f.csv", ["--separator=;", "--encoding=latin-1"])):
        out = tmp_path / name[2:]
        done = invoke(f"histogram {PLAN}", tmp_path / name, CATEGORIES, *form, "--out", out)
        assert done.exit_code == 0, done.stderr
        assert "n = 4 users" in done.stdout
        rows = (out / "histogram.csv").read_text(encoding="utf-8").splitlines()
        assert [row.rpartition(",")[2] for row in rows[1:]] == ["0.5", "0.25", "0.25"]
        assert rows[2].startswith('"Köln, west",')
    counted = count_column(tmp_path / "f.parquet", "town", ["Bonn", "Köln, west", ""], False, "who")
    np.testing.assert_array_equal(counted.counts, [1, 1, 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--separator=;;"], "--separator must be one character, got ';;'"),
        (["--encoding=utf9"], "--encoding must be one that Python knows, got utf9"),
        (["--separator=;"], "must be CSV in UTF-8, a row a line, with no quote left open: line 3: "
         "it is not UTF-8; see --encoding"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_histogram_of_an_export_is_one_line(tmp_path, options, said):
    (tmp_path / "f.csv").write_bytes("who;town\nann;Bonn\nbob;Köln\n".encode("latin-1"))
    given = tmp_path / "f.csv", "--categories=Bonn,Köln", *options
    assert said in refused(f"histogram {PLAN}", *given)
