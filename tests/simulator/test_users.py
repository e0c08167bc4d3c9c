"""Who is one person: ids of every kind, what only looks different, and what a run says of it."""

import csv
import datetime
import functools
import io
import sys
import types
import uuid

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from nights import by_night
from run_world import invoke, refused, tiny_config, told
from shufl.deploy.node import _check_records, _from_file, _without_quotes, users_told
from shufl.learning.config import Data, load
from shufl.learning.data.datasets import Dataset, load_dataset
from shufl.learning.data.files import RecordFile
from shufl.learning.data.person_ids import looks, number_users
from shufl.learning.tasks import Form
from shufl.protocol.console import Console
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare
from shufl.results.run import Run
from shufl.simulator.histogram import count_column

WHO = torch.arange(6) // 2
VISITS = {"p-1": 3, "p-2": 1, "p-3": 2}


class Person:
    """Compared by identity."""


class Shouting(str):
    """Text that compares in its own way."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


SOMEBODY = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.mark.parametrize(
    "users",
    [
        WHO,
        list(WHO),
        WHO.numpy(),
        WHO.int().tolist(),
        [np.int8(0), 0, np.int64(1), WHO[2], np.array(2), 2],
        [f"u{n}" for n in WHO],
        np.array([f"u{n}" for n in WHO]),
        np.array([f"u{n}" for n in WHO], dtype=object),
        np.array([f"u{n}" for n in WHO], dtype="S"),
        [np.str_(f"u{n}") if n else "u0" for n in WHO],
        [bytes([0, n, 255]) for n in WHO],
        [int(n) + 2**60 for n in WHO],
        [uuid.UUID(int=int(n)) for n in WHO],
        [("ward", n) for n in WHO],
        ["a", "a", "A", "A", ("a", 1), ("a", np.int64(1))],
        ["7", "7", "007", "007", "7a", "7a"],
        pa.array([f"u{n}" for n in WHO]),
        pa.array(WHO.numpy()).dictionary_encode(),
    ],
    ids=lambda users: type(users).__name__,
)
def test_ids_are_compared_by_value(users):
    assert number_users(users).tolist() == WHO.tolist()


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ([Person(), Person()], "got Person at 2 of 2 records, first at record 1"),
        (["a", Shouting("b")], "got Shouting at 1 of 2 records, first at record 2"),
        ([1, 1.0], "got float at 1 of 2 records, first at record 2"),
        (torch.tensor([1.0, 2.0]), "got float at 2 of 2"),
        ([1, True], "got bool at 1 of 2"),
        ([[1], [1]], "got list at 2 of 2"),
        ([WHO[:1], WHO[:1]], "got list at 2 of 2"),
        ([bytearray(b"a")], "got bytearray at 1 of 1"),
        ([("a", [1])], "got list at 1 of 1"),
        ([datetime.date(2020, 1, 1)], "got date at 1 of 1"),
        (np.array(["2020", "2021"], "M8[ns]"), "a list or an array of ids.* ndarray of datetime"),
        (list(np.array(["2020", "NaT"], "M8[ns]")), "got datetime64 of datetime64.ns. at 2 of 2"),
        (np.array([(1, "a")], "i4,U1"), "a list or an array of ids, one for each record, got nd"),
        (WHO.to("meta"), "a list or an array of ids, one for each record, got Tensor"),
        (WHO.to_sparse(), "a list or an array of ids, one for each record, got Tensor"),
        ("ab", "a list or an array of ids, one for each record, got str"),
        ({"a", "b"}, "a list or an array of ids, one for each record, got set"),
        (iter("ab"), "a list or an array of ids, one for each record, got str"),
        ([None, "a"], "got no id at 1 of 2 records, first at record 1"),
        ([float("nan"), float("nan"), 1], "got no id at 2 of 3 records, first at record 1"),
        ([1, np.float32("nan"), torch.tensor(torch.nan)], "got no id at 2 of 3"),
        (np.ma.masked_array([1, 2], [False, True]), "got no id at 1 of 2 records, first at rec"),
        (pa.array(["a", None]), "got no id at 1 of 2 records, first at record 2"),
        (["a", type("NAType", (), {})()], "got no id at 1 of 2 records, first at record 2"),
        ([("a", None), ("a", 1)], "got no id at 1 of 2 records, first at record 1"),
        *((["a", no, no], "got no id at 2 of 3 records, first at record 2") for no in (
            *("", "\u200b", "NA", " N/A", "nan", "NaN", "null", "NULL", "None", "<NA>", "NaT"),
            *(b"NA", "none", "Null", "NAN", "-", ".", ("a", "na")),
        )),
    ],
)  # fmt: skip
def test_what_is_no_value_or_none_at_all_is_one_line(users, message):
    with pytest.raises(ConfigError, match=f"^users must .*{message}") as error:
        number_users(users)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("u1", "u1 "), ("u1", "\tu1"), ("\u00e9", "e\u0301"), ("\u00e9", "e\u200b\u0301"),
        ("Mrs Smith", "Mrs  Smith"), ("Mrs Smith", "Mrs\u00a0Smith"), ("Mrs Smith", "Mrs\tSmith"),
        ("u1", "\uff551"), ("u1", "u1\u200d"), ("u1", "u\u00ad1"), ("u1", "u1\ufe0f"),
        ("u1", "\ufeffu1"), ("u1", "u\u31641"), ("u1", "\u202eu1"),
        ("u-1", "u\u20111"), ("O'Brien", "O\u2019Brien"), ("u1", '"u1"'), ("u1", b"u1"),
        (1, "1"), ("1", "\uff11"), (("a", 1), ("a", "1")), ("u1", "u1\u2800"),
        (uuid.UUID(int=1), str(uuid.UUID(int=1))), (SOMEBODY, SOMEBODY.upper()),
        (SOMEBODY, SOMEBODY.replace("-", "")), (SOMEBODY, f"urn:uuid:{SOMEBODY}"),
        (SOMEBODY, "{" + SOMEBODY + "}"), ("7", "7.0"), ("1000", "1e3"), ("7", "+7"), ("0", "-0"),
        ("2.5", "2.50"), ("u1", "'u1'"), ("u1", "\u201eu1\u201c"), ("u1", "\u00abu1\u00bb"),
        ("u1", "`u1`"), ("u1", '\\"u1\\"'), ("O'Brien", "O\u00b4Brien"),
        ("O'Brien", "O\u2032Brien"), ("O'Brien", "O`Brien"), ("u-1", "u\u02d71"),
        ("u-1", "u\u20431"), ("u1", "u1\U0001d159"),
        ("u1", b"u1\0"), ("u1", ("u1",)),
    ],
)  # fmt: skip
def test_two_spellings_of_one_id_are_refused_and_both_are_named(one, other):
    with pytest.raises(ConfigError, match="must be spelt alike for one person") as error:
        number_users([one, "u7", other, one], "f.csv: column id", "line", 2)
    shown = f"{other!a}".replace("  ", " \\x20")  # a terminal's line would have one space
    said = f"line 4 has {shown}, which looks like {one!a} at line 2 and is another"
    assert f"f.csv: column id must be spelt alike for one person: {said} (1 of 3" in str(
        error.value
    )
    assert str(error.value).isascii()


def test_what_differs_for_a_reader_is_kept_apart():
    assert len({looks(text) for text in ("u1", "U1", "u2", "u 1", "u-1", "u_1", "\u0430")}) == 7


@pytest.fixture
def made(monkeypatch):
    """Makes a dataset of these users the one that `the_ids:made` names."""

    def make(users):
        module = types.ModuleType("the_ids")
        x, y = torch.arange(1600.0).reshape(400, 4), torch.arange(400) % 2
        data = Dataset(x[:300], y[:300], x[300:], y[300:], classes=2, users=users)
        module.made = lambda: data
        monkeypatch.setitem(sys.modules, "the_ids", module)
        load_dataset.cache_clear()

    yield make
    load_dataset.cache_clear()


OWN = (
    "data.users=",
    "data.dataset=the_ids:made",
    "model.name=logistic-regression",
    "model.options={}",
)
VECTORISED = "simulation.engine=vectorised", "privacy.rounds=1"


def said_at_start(tmp_path, *sets):
    """The line of the data, and the closing table's line of users."""
    console = Console(record=True, quiet=False, width=250, file=io.StringIO())
    config = load(str(tiny_config(tmp_path, 1)), [*sets, *VECTORISED])
    Run.new(config, tmp_path / "runs", console).train()
    lines = console.export_text().splitlines()
    return lines[0], " ".join(next(each for each in lines if "users   " in each).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((), "30 users by Dataset.users, 10 records each, 300 in all"),
        *by_night((
            ("data.users=20",),
            "20 users by Dataset.users, 10 records each, 200 in all (100 more are left out)",
        )),
        (("data.partition=iid", "data.users=150"),
         "150 users made by partition iid, not those of the data (what each gets is taken for "
         "one person's), 2 records each, 300 in all"),
    ],
)  # fmt: skip
def test_a_run_begins_and_ends_with_who_its_users_are(made, tmp_path, sets, said):
    made(list(torch.arange(300) // 10))
    start, end = said_at_start(tmp_path, *OWN, *sets)
    assert f"the_ids:made, {said}; logistic" in start
    count, _, by = said.partition(" users ")
    assert end.startswith(
        f"│ users │ {count} {by.partition(', 10 rec')[0].partition(', 2 rec')[0]}"
    )


def records(path, lines="", names="patient,age,ill"):
    """A file of visits, then these lines."""
    rows = [f"{who},{40 + n},{n % 2}" for who, times in VISITS.items() for n in range(times)]
    path.write_bytes("\n".join([names, *rows, ""]).encode() + lines.encode("latin-1"))
    return RecordFile(file=str(path), user="patient", label="ill", classes=2)


@pytest.mark.parametrize("missing", ["NA", "nan", "null", "None", "", '""', "N/A", " "])
def test_an_id_that_a_reader_takes_for_a_missing_value_is_refused(tmp_path, missing):
    file = records(tmp_path / "f.csv", f"{missing},1,1\n")
    said = "f.csv: column patient must say whose .* got no id at 1 of 7 lines, first at line 8"
    with pytest.raises(ConfigError, match=said):
        file.load()
    with pytest.raises(ConfigError, match=said):
        _from_file(tmp_path / "f.csv", file, 4)


@pytest.mark.parametrize(
    ("column", "people"),
    [
        (pa.array([2**60, 2**60 + 1, 2**60 + 1]), [0, 1, 1]),
        (pa.array([2**64 - 1, 1, 1], pa.uint64()), [0, 1, 1]),
        (pa.array([b"a", b"b", b"b"]), [0, 1, 1]),
        (pa.array([b"\0a", b"\0b", b"\0b"], pa.binary(2)), [0, 1, 1]),
        (pa.array([2.0**60, 1.0, 1.0]), "got double$"),
        (pa.array([1, None, 1]), "got no id at 1 of 3 records, first at record 2"),
        (pa.array(["a", "a ", "b"]), "record 2 has 'a ', which looks like 'a' at record 1"),
    ],
)
def test_ids_of_every_type_in_parquet(tmp_path, column, people):
    path = tmp_path / "f.parquet"
    parquet.write_table(pa.table({"patient": column, "age": [1, 2, 3], "ill": [0, 1, 0]}), path)
    file = RecordFile(file=str(path), user="patient", label="ill", classes=2)
    if isinstance(people, list):
        assert file.records_in(path)[2].tolist() == people
        return
    with pytest.raises(ConfigError, match=f"f.parquet: column patient must .*{people}"):
        file.records_in(path)


SECRET = "Mrs Smith"


@pytest.mark.parametrize(
    ("lines", "names", "said"),
    [
        (f"{SECRET}\n", None, "line 8 has 1 fields, line 1 has 3"),
        (f"\n\n1,2,3,{SECRET}\n", None, "record 7 has 4 fields"),
        (f'"{SECRET},1,2\n', None, "record 7 has 1 fields"),
        (f"p,{SECRET},1\n", None,
         "column age must be .* at 1 of 7 lines, first at line 8"),
        (f"p,1,{SECRET}\n", None,
         "column ill must be .* at 1 of 7 lines, first at line 8"),
        ("p,1,4711\n", None,
         "column ill must be from 0 to 1, got others at 1 of 7 lines, first at line 8"),
        ("p,99999999,1\n", None,
         "column age must be whole numbers of at most .* first at record 7"),
        (f"{SECRET}\xe9,1,1\n", None,
         "it is not in UTF-8 at 1 of 8 lines, first at line 8: encoding = "),
        ("", f"{SECRET},40,1", "line 1 must name a column patient, got 3 other columns$"),
        ("", f"patient,{SECRET},1", "line 1 must name a column ill, got 3 other columns$"),
        ("", f"{SECRET},{SECRET},1", "line 1 must name a column patient, got 3 other columns$"),
        ("", f"patient,{SECRET},{SECRET}", "line 1 must name a column ill"),
        ("", "patient4711,40,1", "line 1 must name a column patient, got 3 other columns$"),
    ],
)  # fmt: skip
def test_no_error_of_a_file_quotes_a_record(tmp_path, lines, names, said):
    path = tmp_path / "f.csv"
    file = records(path, lines, names or "patient,age,ill")
    form = Form((1,), 2)

    def deployed():
        read = _from_file(path, file, 4)
        for user in range(4):
            _check_records(read, user, form)

    def simulated():
        load_dataset.cache_clear()
        load_dataset(file)

    for attempt in (deployed, simulated):
        with pytest.raises(ConfigError, match=said) as error:
            attempt()
        assert not any(value in str(error.value) for value in (SECRET, "4711", "99999999", "\n"))


BROKEN = f"""
import torch
from shufl import Dataset

def table():
    return float("{SECRET}")

def by_id():
    return {{}}["{SECRET}"]

def leaves():
    raise SystemExit("{SECRET} is no number")

def records(user):
    raise OSError("{SECRET}")

def features(rows):
    raise ValueError("{SECRET}")

def loss(outputs, labels):
    return (outputs.squeeze(1) - labels).square()

def metrics(outputs, labels):
    raise ValueError("{SECRET}")

def houses():
    x, y = torch.arange(40.0).reshape(10, 4), torch.arange(10.0)
    import shufl
    return Dataset(x, y, x, y, task=shufl.Task(loss, metrics, "rmse"))
"""


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["data.dataset=broken:table"], "could not be loaded: ValueError (broken.py, line 6)"),
        (["data.dataset=broken:by_id"], "could not be loaded: KeyError (broken.py, line 9)"),
        (["data.dataset=broken:leaves"],
         "could not be loaded: it calls sys.exit(…) (broken.py, li"),
        (["data.dataset=at_import:it"], "could not be imported: ValueError (at_import.py, line 1)"),
        (["data.features=broken:features"],
         "could not map records of shape (1, 8, 8): ValueError (broken.py, line 18)"),
        (["data.dataset=broken:houses"],
         "cannot measure the model on test records: ValueError (broken.py, line 24)"),
    ],
)  # fmt: skip
def test_no_error_of_your_own_code_quotes_a_record(tmp_path, monkeypatch, sets, said):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "at_import.py").write_text(f'it = float("{SECRET}")\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    load_dataset.cache_clear()
    own = "model.name=logistic-regression", "model.options={}", "data.users="
    with pytest.raises(ConfigError) as error:
        prepare(load(str(tiny_config(tmp_path, 1)), [*VECTORISED, *own, *sets]))
    assert said in str(error.value) and SECRET not in str(error.value)


def raises(kind):
    def records(user):
        raise kind(SECRET)

    return records


OS_ERROR = functools.partial(OSError, 5)
KINDS = OSError, OS_ERROR, ValueError, KeyError, SystemExit, TypeError


@pytest.mark.parametrize("records", [*map(raises, KINDS), lambda user: 1, lambda user: [user] * 3])
def test_no_error_of_a_nodes_records_quotes_one(records):
    with pytest.raises(ConfigError, match="the records of user 0 cannot be read: ") as error:
        _check_records(records, 0, Form((1,), 2))
    said = str(error.value)
    assert SECRET not in said and "\n" not in said
    assert "test_users.py, line" in said or records.__name__ == "<lambda>"


def test_records_that_cannot_be_read_any_more_are_not_quoted_either():
    """They are checked at the start, and read once more for the process that computes."""

    def records(user):
        raise ValueError(f"could not convert string to float: {SECRET!r}")

    with pytest.raises(ConfigError, match=r"any more: ValueError \(test_users.py, line") as error:
        _without_quotes(lambda: records)(0)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("mine.csv", "3 users by column patient of mine.csv"),
        ("folder", "3 users by the files of folder, each of which is taken for one person's"),
        ("mine:records", "3 users as mine:records numbers them"),
        ("simulated", "3 users by column patient"),
    ],
)
def test_a_node_says_for_how_many_people_it_speaks(tmp_path, data, said):
    file = records(tmp_path / "f.csv")
    config = types.SimpleNamespace(data=Data(dataset=file, partition="natural"))
    assert users_told(types.SimpleNamespace(data=data, users=3), config) == said


@pytest.fixture
def visits(tmp_path):
    """3000 patients, one visit at A and three at B each, in any order."""
    path = tmp_path / "visits.csv"
    rows = [(f"p{n}", ward) for n in range(3000) for ward in "ABBB"]
    order = np.random.default_rng(3).permutation(len(rows))
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("patient", "ward"), *(rows[n] for n in order)])
    return path


NAMED = ["A", "B"]


@pytest.mark.parametrize("seed", [0, 1, None])
def test_of_each_person_one_row_counts_uniformly_at_random(visits, seed):
    found = count_column(visits, "ward", NAMED, False, "patient", seed)
    assert (found.counts.sum(), found.rows) == (3000, 12_000)
    np.testing.assert_allclose(found.shares, [0.25, 0.75])
    assert abs(found.counts[1] - 2250) < 7 * np.sqrt(3000 * 0.75 * 0.25)
    again = count_column(visits, "ward", NAMED, False, "patient", seed)
    assert (seed is None) or (again.counts == found.counts).all()
    rows = count_column(visits, "ward", NAMED, False)
    assert rows.counts.tolist() == [3000, 9000]


def test_a_persons_choice_does_not_depend_on_another_persons_rows(tmp_path):
    """Of a thousand people with rows of their own; the last one has one row, or fifty."""
    people = [(f"p{n}", f"{n}-{row}") for n in range(1000) for row in range(1 + n % 5)]
    names = [value for _, value in people]
    chosen = []
    for more in (1, 50):
        path = tmp_path / f"{more}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            last = [("last", "0-0")] * more
            csv.writer(file).writerows([("patient", "ward"), *people, *last])
        chosen.append(count_column(path, "ward", names, False, "patient", 5).counts)
    assert (chosen[0] == chosen[1]).all() and chosen[0].sum() == 1001


def test_a_histogram_says_who_is_one_person(visits):
    rows = f"histogram {visits} --column ward --categories A,B --target-epsilon 2"
    people = f"{rows} --user-column patient"
    shown = [invoke(command).stdout for command in (rows, people)]
    assert "n = 12000 users, each of 12 000 rows is taken for one person" in shown[0]
    said = "n = 3000 users, by column patient: one of each one's rows counts, at random, of 12 000"
    assert said in shown[1]
    found = told(people)
    assert found["users"] == 3000 and found["privacy"]["delta"] == 1 / 3000
    assert found["users_by"] in shown[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("patient,ward\nu1,A\nu1 ,B\n", "line 3 has 'u1 ', which looks like 'u1' at line 2"),
        ("patient,ward\nu1,A\n,B\n", "got no id at 1 of 2 lines, first at line 3"),
        ("patient,ward\nu1,A\nNA,B\n", "got no id at 1 of 2 lines, first at line 3"),
        ("person,ward\nu1,A\n", "--user-column: line 1 must name a column patient, got 2 other"),
        (f"patient,ward\nu1,{SECRET}\n", "line 2: column 'ward' has a value that is not among"),
        (f"patient,ward\n{SECRET}\n", "line 2: it has 1 fields, line 1 has 2"),
        (f"{SECRET},A\nu1,A\n", "--column: line 1 must name a column ward, got 2 other columns"),
    ],
)
def test_mistakes_of_a_histogram_are_one_line_and_quote_no_row(tmp_path, content, message):
    path = tmp_path / "f.csv"
    path.write_text(content)
    given = "--column ward --user-column patient --categories A,B --target-epsilon 2 --delta 0.01"
    line = refused(f"histogram {path} {given}")
    assert message in line and SECRET not in line
