"""`shufl histogram` of a column: estimates, their errors, and every mistake in one line."""

import csv
import re

import numpy as np
import pytest

from run_world import invoke, refused, shufl, told
from shufl.cli.histogram import _categories
from shufl.simulator.histogram import Histogram, count_column, plan_for, simulate

COUNTS = np.array([5_000, 3_000, 1_500, 480, 20])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accountant", "rate", "local"),
    [("blanket", 1.0, None), ("blanket", 0.4, 2.0), ("crowd", 0.7, None), ("local", 1.0, None)],
)
def test_errors_are_what_they_are_said_to_be(accountant, rate, local):
    users = int(COUNTS.sum())
    given = {"target_epsilon": 1.0, "delta": 1e-6, "check_in_rate": rate, "local_epsilon": local}
    plan, _ = plan_for(users, len(COUNTS), accountant, **given)
    found = [simulate(COUNTS, plan, seed) for seed in range(400)]
    scores = np.array([(each.shares - COUNTS / users) / each.errors for each in found])
    np.testing.assert_allclose(scores.mean(axis=0), 0.0, atol=0.25)
    np.testing.assert_allclose(scores.std(axis=0), 1.0, atol=0.15)
    assert 0.93 < (np.abs(scores) < 1.96).mean() < 0.97


@pytest.mark.slow
def test_errors_cover_users_of_several_records():
    """Each user has the same shares of the categories and reports of one drawn from them."""
    users, held = 2_000, np.array([0.5, 0.3, 0.2])
    plan, _ = plan_for(users, 3, target_epsilon=4.0, delta=1e-6, check_in_rate=0.7)
    draw, k = np.random.default_rng(8), 3
    expected = Histogram.of(held, plan).errors
    assert (expected > 1.1 * Histogram.of(held, plan, one_each=True).errors).all()
    found = []
    for _ in range(1_000):
        present = draw.binomial(users, plan.check_in_rate)
        true = draw.binomial(present, plan.mechanism.truth)
        uniform = present - true + draw.poisson(plan.shuffler_blankets)
        reports = draw.multinomial(true, held) + draw.multinomial(uniform, np.full(k, 1 / k))
        scale = users * plan.check_in_rate * plan.mechanism.truth
        found.append(1 / k + (reports - reports.sum() / k) / scale)
    np.testing.assert_allclose(np.std(found, axis=0) / expected, 1.0, atol=0.1)


def test_consistent_shares_are_the_nearest_on_the_simplex():
    draw = np.random.default_rng(5)
    for _ in range(50):
        raw = draw.normal(0.2, 0.3, 6)
        found = Histogram(raw, raw).consistent().shares
        assert found.min() >= 0
        assert found.sum() == pytest.approx(1)
        for other in draw.dirichlet(np.ones(6), 200):
            assert np.sum((raw - found) ** 2) <= np.sum((raw - other) ** 2) + 1e-12
    shares = np.array([0.7, 0.2, 0.1])
    np.testing.assert_allclose(Histogram(shares, shares).consistent().shares, shares)


@pytest.fixture
def column(tmp_path):
    path = tmp_path / "people.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["name", "town"])
        for place, count in enumerate((600, 300, 95, 5)):
            rows.writerows([f"p{i}", "ABCD"[place]] for i in range(count))
    return path


@pytest.mark.slow
def test_a_column_becomes_a_table_a_file_and_a_plot(column, tmp_path):
    out = tmp_path / "out"
    given = ["--column", "town", "--categories", "A,B,C", "--other", "--target-epsilon", "1"]
    done = shufl("histogram", str(column), *given, "--out", str(out), "--consistent")
    searched = "searching for local epsilon and shuffler blankets within epsilon 1\n"
    assert (done.returncode, done.stderr) == (0, searched)
    assert "simulated: all that is random follows from the seed\non real" in done.stdout
    assert "a round can be lost, with its ε: have a budget for two" in done.stdout
    with (out / "histogram.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["category"] for row in rows] == ["A", "B", "C", "other"]
    assert [float(row["true"]) for row in rows] == [0.6, 0.3, 0.095, 0.005]
    for row in rows:
        error = abs(float(row["share"]) - float(row["true"]))
        assert error < 5 * float(row["standard_error"])
    assert (out / "histogram.png").stat().st_size > 5_000
    found = told("histogram", column, *given)
    assert found["users"] == 1000
    assert 0.99 < found["epsilon"]["blanket"]["epsilon"] <= 1.0
    assert sum(each["share"] for each in found["histogram"]) == pytest.approx(1)


@pytest.mark.slow
def test_a_target_that_is_not_used_up_is_told(column):
    asked = f"histogram {column} {WHOLE} --target-epsilon 90"
    (line,) = invoke(asked).stderr.splitlines()
    assert line.startswith("warning: the target is not used up: ε is ")
    assert line.endswith("no further than local_epsilon = 20, shuffler_blankets = 0.1")


@pytest.mark.slow
def test_of_many_categories_the_largest_are_shown(column, tmp_path):
    many = tmp_path / "many.txt"
    many.write_text("\n".join(["A", "B", "C", "D", *(f"town {i}" for i in range(300))]))
    asked = f"histogram {column} --column town --categories {many} --target-epsilon 1"
    shown = invoke(asked).stdout
    assert "the largest 60 of 304; --out writes all" in shown
    assert shown.index("│ A ") < shown.index("│ B ")


WHOLE = "--categories A,B,C,D --column town --target-epsilon 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--categories is missing"),
        ("--categories A,B", "--column is missing"),
        ("--categories A,B --column town", "--target-epsilon is missing"),
        (f"{WHOLE} --column city", "--column: line 1 must name a column city, got 2 other"),
        (f"{WHOLE} --categories A,B,C", "line 997: column 'town' has a value that is not among"),
        (f"{WHOLE} --categories A,A", "--categories must be all different"),
        (f"{WHOLE} --categories A", "--categories must be at least 2, got 1"),
        (f"{WHOLE} --local-epsilon 21", "--local-epsilon must be a number in [1e-9, 20]"),
        (f"{WHOLE} --accountant local --local-epsilon 5",
         "--local-epsilon must be smaller for ε 1: by local, 5 costs 4.999"),
        (f"{WHOLE} --accountant pld", "--accountant must be"),
        (f"{WHOLE} --categories A,{'B' * 300}", "has a value that is not among --categories"),
    ],
)  # fmt: skip
def test_every_mistake_is_one_line(column, arguments, message):
    assert message in refused(f"histogram {column} {arguments}")


HEAD, NAMED = "id,town\n", ["Bath", "Leeds", "York"]


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        (HEAD + '1,Bath\n2,"Leeds\n3,York\n', 3, "unexpected end of data"),
        (HEAD + '1,"Leeds"x\n', 2, "',' expected after '\"'"),
        ('"id,town\n1,Bath\n', 1, "unexpected end of data"),
        (HEAD + "1\n", 2, "it has 1 fields, line 1 has 2"),
        (HEAD + "1,Bath,\n", 2, "it has 3 fields, line 1 has 2"),
        (HEAD + "1,Bath\n\n2,York\n", 3, "it has 0 fields, line 1 has 2"),
        ("town\nBath\n\nYork\n", 3, "it has 0 fields, line 1 has 1"),
        (HEAD + "1,Bath\r2,York\n", 2, "new-line character seen in unquoted field"),
        (HEAD.encode() + "1,Köln\n".encode("latin-1"), 2, "it is not UTF-8"),
        (("\ufeff" + HEAD + "1,Bath\n").encode("utf-16-le"), 1, "it is not UTF-8"),
        (HEAD + f"1,{'B' * 200_000}\n", 2, "field larger than field limit (131072)"),
    ],
)
def test_a_line_that_is_no_row_is_named_whatever_would_become_of_it(tmp_path, content, line, why):
    path = tmp_path / "people.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for other in (False, True):
        categories = [*NAMED, "other"] if other else NAMED
        with pytest.raises(ValueError, match=rf"people\.csv must be CSV in UTF-8.*: line {line}: "):
            count_column(path, "town", categories, other)
    with pytest.raises(ValueError, match=re.escape(why)):
        count_column(path, "town", NAMED, False)


def test_a_column_whose_name_another_one_looks_like_is_refused(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("id,town, town\n1,Bath,York\n")
    with pytest.raises(ValueError, match="--column must differ from all other columns, got town"):
        count_column(path, "town", NAMED, False)


LIKE_BATH = [" Bath", "Bath ", "Bath\u200b", "Ba\u00adth", "Ｂath", "\tBath", '"Ba\rth"', "Ba\0th"]
LIKE_BATH += [' "Bath"', 'Ba"th', 'Bath"', "\ufeffBath"]


@pytest.mark.parametrize("value", LIKE_BATH)
def test_a_value_that_only_looks_like_a_category_is_not_counted_as_other(tmp_path, value):
    path = tmp_path / "people.csv"
    path.write_bytes(f"{HEAD}1,York\n2,{value}\n".encode())
    with pytest.raises(ValueError, match=r"line 3: column 'town' has .* looks like the category"):
        count_column(path, "town", [*NAMED, "other"], True)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_every_row_of_a_good_file_is_counted(tmp_path, begin, end):
    rows = [
        *("id,town", '1,"Bath, Somerset"', "2,York", '"3","York"', '"4","a ""quoted"" name"'),
        *("5,", '"6, or 7",""', '"say ""8""",Köln', "9,👩\u200d🚒"),
    ]
    path = tmp_path / "people.csv"
    categories = ["Bath, Somerset", "York", 'a "quoted" name', "", "👩\u200d🚒", "other"]
    for last in ("", end):
        path.write_bytes((begin + end.join(rows) + last).encode())
        assert count_column(path, "town", categories, True).counts.tolist() == [1, 2, 1, 2, 1, 1]


def test_rows_and_counts_are_those_that_a_writer_of_csv_wrote(tmp_path):
    draw = np.random.default_rng(6)
    alphabet = list("ab\", ;\t'é")
    values = ["".join(draw.choice(alphabet, draw.integers(0, 6))) for _ in range(3_000)]
    path = tmp_path / "people.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "town"], *enumerate(values)])
    categories = sorted(set(values))
    counts = count_column(path, "town", categories, False).counts
    assert counts.tolist() == [values.count(category) for category in categories]


@pytest.mark.parametrize("text", ['A,"",B', "A,,B", "A, ,B", "file"])
def test_the_empty_value_can_be_named(tmp_path, text):
    if text == "file":
        (tmp_path / "categories.txt").write_text('A\n\n""\nB\n\n')
        text = str(tmp_path / "categories.txt")
    assert _categories(text, True) == ["A", "", "B", "other"]
    with pytest.raises(ValueError, match="must be all different, got '' twice"):
        _categories('A,"",,B', True)


def test_the_empty_value_is_shown_and_written(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("id,town\n1,A\n2,\n3,\n4,B\n")
    given = f"{WHOLE} --delta 1e-6 --accountant local --categories A,,B"
    done = invoke(f"histogram {path} {given} --out {tmp_path}/out")
    assert done.exit_code == 0, done.stderr
    assert "n = 4" in done.stdout and '│ ""' in done.stdout
    with (tmp_path / "out" / "histogram.csv").open(encoding="utf-8", newline="") as file:
        assert {row["category"]: row["true"] for row in csv.DictReader(file)}[""] == "0.5"
    with pytest.raises(ValueError, match=r'line 3: column .* has the empty value, which "" names'):
        count_column(path, "town", ["A", "B"], False)


def test_files_without_rows_are_refused(tmp_path):
    for content in ("", "town\n", "town"):
        (tmp_path / "empty.csv").write_text(content)
        with pytest.raises(ValueError, match="has no rows"):
            count_column(tmp_path / "empty.csv", "town", ["A", "B"], False)


@pytest.mark.parametrize("content", ["town\nKöln\n".encode("latin-1"), b"town\n" + b"A" * 200_000])
def test_what_is_no_csv_in_utf_8_is_one_line(tmp_path, content):
    path = tmp_path / "people.csv"
    path.write_bytes(content)
    asked = f"histogram {path} --column town --target-epsilon 1 --categories {path}"
    assert "people.csv must be " in refused(asked)
