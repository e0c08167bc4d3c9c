"""The documents are true of the code where a test can tell, link to what exists, and keep form."""

import ast
import contextlib
import csv
import io
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.main import get_command

from nights import by_night
from shufl.accounting import ACCOUNTANTS, epsilon_table, rounds_within_budget
from shufl.cli.__main__ import app
from shufl.learning.config import Config, load
from shufl.protocol.console import Console
from shufl.results.experiment import prepare
from shufl.results.tables import epsilon_rows, epsilon_text, print_epsilons
from test_house import ROOMS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ROOT, ROOT / "docs", ROOT / "docs/theory"
FOUND = ROOT / "docs/results/README.md"
PAGES = sorted([FOUND, *(page for folder in FOLDERS for page in folder.glob("*.md"))])
RATES = {"low": 1, "medium": 2, "high": 3}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors_of(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)", without_code(text_of(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_lists_what_is_played_on_machines():
    played = ast.parse(text_of("tests/machines/test_machines.py")).body
    functions = [each for each in played if isinstance(each, ast.FunctionDef)]
    told = [ast.get_docstring(each) for each in functions if each.name.startswith("test_")]
    listed = text_of("docs/deployment.md").partition("## Played on machines")[2]
    assert re.findall("^- (.*)", listed, re.M) == told


@each_page
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)]+)\)", without_code(text_of(page))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors_of(linked), target


@each_page
def test_files_and_commands_that_are_named_exist(page):
    """Tests named without a folder: in tests/attacks, as docs/threat-model.md says."""
    text, rooms = text_of(page), "|".join([*ROOMS, "benchmarks", "tests"])
    named = re.findall(rf"\b((?:{rooms})/[\w/]+\.(?:py|toml|proto))\b", text)
    if page.name == "threat-model.md":
        named += [f"tests/attacks/{name}" for name in re.findall(r"`(test_\w+\.py)`", text)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert set(re.findall(r"^\$ shufl (\S+)", text, re.M)) <= set(get_command(app).commands)


@each_page
def test_lines_of_prose_have_at_most_120_characters(page):
    long = [
        line for line in text_of(page).splitlines() if len(line) > 120 and not line.startswith("|")
    ]
    assert long == []


def test_the_readme_is_a_page():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 77
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
def test_the_readme_shows_the_epsilons_that_the_quickstart_prints():
    """The search of `crowd` may end elsewhere where a processor rounds otherwise."""
    (screen,) = re.findall(r"^```\n(round .*?)^```", text_of("README.md"), re.S | re.M)
    first, _, _, *shown = screen.splitlines()
    plan = prepare(load("quickstart")).plan
    rounds = rounds_within_budget(plan)
    rows = epsilon_rows(epsilon_table(plan, rounds))
    printed = io.StringIO()
    print_epsilons(Console(file=printed, width=80), "", rows, plan.accountant)
    told = re.findall(r"^│ \w.*", printed.getvalue(), re.M)
    crowd = re.compile(r"(?<=│ crowd            │ ) *[\d.]+")
    (ours,), (theirs,) = (crowd.findall("\n".join(lines)) for lines in (shown, told))
    assert float(ours) == pytest.approx(float(theirs), rel=0.002)
    assert [crowd.sub("", line) for line in shown] == [crowd.sub("", line) for line in told]
    halting, every_pair = (epsilon_text(rows[name]["epsilon"]) for name in ("theorem3", "blanket"))
    assert first.startswith(f"round {rounds}/{rounds} ")
    assert f" ε {halting} of {plan.target_epsilon:g}, {every_pair} for every pair " in first


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "coming-from.md"]
    + by_night(ROOT / "docs/coming-from.md"),
    ids=lambda page: page.name,
)
def test_python_examples_print_what_they_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs make a folder there
    for example in re.findall(r"^```python\n(.*?)^```", text_of(page), re.S | re.M):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(example, {})
        assert printed.getvalue().split("\n")[:-1] == re.findall(
            r"^print.*  # (.*)$", example, re.M
        )


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)
def test_what_a_notebook_imports_exists(path):
    """By day one notebook alone is run."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imports = re.findall(r"^(?:from|import) .*", code, re.M)
    assert imports
    exec("\n".join(imports), {})


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    """With the docstrings of the API; a link or a heading that is not there is a warning.

    Nor does a page show a code fence, or the `>>>` of an example, as its Markdown had it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 'id="shufl.api.run"' in (tmp_path / "site/api/index.html").read_text()
    assert "Two commands" in (tmp_path / "site/index.html").read_text()
    for page in (tmp_path / "site").rglob("index.html"):
        text = re.sub("<[^>]+>", "", page.read_text())  # what is seen
        assert "```" not in text and not re.search("<blockquote>\\s*<blockquote>", page.read_text())


@pytest.mark.parametrize("name", ["README.md", "docs/accounting.md"])
def test_the_table_of_accountants_says_of_each_what_it_holds_for(name):
    form = r"^\| `([\w-]+)`[^|]*\| (the homogeneous pair|\*\*every\*\* pair)"
    said = dict(re.findall(form, text_of(name), re.M))
    said = {name: words.replace("**", "").removeprefix("the ") for name, words in said.items()}
    assert said == {name: cls.holds_for for name, cls in ACCOUNTANTS.items()}


PARTIES = (
    *("server", "shuffler", "network", "other users", "a node's owner", "authority"),
    "whoever sees the models",
)


def rows_of(text):
    """The rows of the first table by their first cell, each a dictionary by heads of columns."""
    table = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def claims():
    """The section on claims, and its table: what is said and the numbers of attacks."""
    (section,) = re.findall(r"^## Claims\n(.*?)^## ", text_of("docs/threat-model.md"), re.S | re.M)
    form = re.compile(r"(no claim|holds|holds if [^()]+) ?(?:\(([\d, ]+)\))?")
    found = {}
    for row, cells in rows_of(section).items():
        assert tuple(cells) == PARTIES
        matches = {party: form.fullmatch(cell) for party, cell in cells.items()}
        assert all(matches.values()), cells
        found[row] = {
            party: (match[1].strip(), re.findall(r"\d+", match[2] or ""))
            for party, match in matches.items()
        }
    return section, found


def test_each_claim_that_holds_names_attacks_that_are_tests():
    section, found = claims()
    attacks = dict(re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section, re.S | re.M))
    named = set()
    for row, cells in found.items():
        for party, (said, numbers) in cells.items():
            assert bool(numbers) == said.startswith("holds"), (row, party)
            named |= set(numbers)
    assert named == set(attacks)
    for number, text in attacks.items():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
        assert tests and len(tests) == text.count("::"), number
        for file, name in tests:
            functions = ast.parse(text_of(file)).body
            assert name in {each.name for each in functions if isinstance(each, ast.FunctionDef)}


def test_claims_are_those_of_the_accountants_and_of_the_other_tables():
    _, found = claims()
    pages = {
        page: {row: " ".join(cells.values()) for row, cells in rows_of(text).items()}
        for page, text in (
            ("README.md", text_of("README.md").partition("## What ε means")[2]),
            ("accounting.md", text_of("docs/accounting.md").partition("## What ε means")[2]),
        )
    }
    names = [re.match(r"`([\w-]+)`", row)[1] for row in found]
    assert names == [*ACCOUNTANTS]
    for row, name in zip(found, names, strict=True):
        accountant = ACCOUNTANTS[name]
        assert ("homogeneous pair" in row) == (accountant.holds_for == "homogeneous pair")
        same = "the same assumptions as theorem3"
        covers = accountant.covers.replace(same, ACCOUNTANTS["theorem3"].covers)
        said = {party: words for party, (words, _) in found[row].items()}
        for party in ("other users", "a node's owner", "authority"):
            assert said[party].startswith(
                "holds if enough are honest" if accountant.counts_on_others else "holds"
            )
            assert (said[party] == "holds") != accountant.counts_on_others
        counts = "n users" in covers
        assert counts == accountant.counts_on_others
        # Whoever counts on others must have them counted, against those who leave them out.
        for party in ("server", "network"):
            assert said[party] == ("holds if counted" if counts else "holds")
        assert (said["shuffler"] == "no claim") == ("shuffled reports" in covers)
        assert ("against all but the shuffler" in covers) == accountant.counts_on_blankets
        assert said["whoever sees the models"] == "holds"
        (readme,) = (text for row, text in pages["README.md"].items() if f"`{name}`" in row)
        (page,) = (text for row, text in pages["accounting.md"].items() if f"`{name}`" in row)
        for text in (readme, page):
            assert bool(re.search(r"other (n − 1 )?users|all users|homogeneous", text)) == counts
            assert ("blankets" in text or "noise alone" in text) == accountant.counts_on_blankets
        assert ("whoever else takes part" in page) != counts
        assert ("shuffler cheats" in page or "or server" in page) == (said["shuffler"] == "holds")


def keys_of(section, prefix=""):
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("key", list(keys_of(Config)))
def test_every_key_of_a_configuration_is_explained(key):
    text = text_of("docs/running.md") + text_of("docs/vectorised.md")
    leaf = key.rpartition(".")[2]
    assert re.search(rf"^\|[^|]*`(\w*\.)?{leaf}`", text, re.M)


def test_sharp_edges_are_rated_and_sorted_within_each_group():
    form = r"### [^\n]+\n\nLikelihood: (\w+) · Damage: (\w+) · What to do: \S"
    for group in text_of("docs/sharp-edges.md").split("\n## ")[1:]:
        rated = re.findall(form, group)
        assert rated and len(rated) == group.count("\n### ")
        products = [RATES[likelihood] * RATES[damage] for likelihood, damage in rated]
        assert products == sorted(products, reverse=True)


def runs_of(table):
    """The rows of a published table, by series and value as its page shows it."""
    found = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            with contextlib.suppress(ValueError):
                row["value"] = f"{float(row['value']):g}"
            found.setdefault((row["series"], row["value"]), []).append(row)
    return found


@pytest.mark.parametrize(
    "table", sorted((ROOT / "docs/results").glob("*.csv")), ids=lambda path: path.stem
)
def test_a_published_page_says_of_its_runs_what_they_say(table):
    """No ε below theirs, the code that made them, and whether there is but one seed."""
    runs, text = runs_of(table), text_of(table.with_suffix(".md"))
    rows = [row for each in runs.values() for row in each]
    most = {}
    for row in rows:
        for name, epsilon in row.items():
            if name.startswith("epsilon_") and epsilon:
                key = row["series"], row["value"], name
                most[key] = max(most.get(key, 0.0), float(epsilon))
    cells = {cell.strip() for cell in text.split("|")}
    assert most and {epsilon_text(epsilon) for epsilon in most.values()} <= cells
    what_each_did = text.partition("## What each run did\n")[2]
    head, _, *lines = re.search(r"(?:^\|.*\n)+", what_each_did, re.M)[0].splitlines()
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head.endswith(" code |")
    assert {(series, value): made for series, value, *_, made in told} == {
        key: ", ".join(dict.fromkeys(row["commit"] for row in each)) for key, each in runs.items()
    }
    seeds = {row["seed"] for row in rows}
    assert ("one seed" in text) == (len(seeds) == 1) == ("mean and range" not in text)
    (number,) = re.findall(rf"^\|[^|]*\({table.stem}\.md\)[^|]*\| (\d) \|", text_of(FOUND), re.M)
    assert int(number) == len(seeds)


def test_the_page_of_published_numbers_has_those_of_the_paper_s_table():
    table, figure = text_of("docs/results/published.md").split("\n## ")[1:3]
    rows = rows_of(table)
    assert [*rows] == [*"1234567"]
    for row in rows.values():
        assert row["*Ours*"] in ("–", row["RDP, orders to 30"])
    assert float(rows["1"]["*Clones*"]) < float(rows["1"]["*Ours*"])
    assert figure.startswith("Figure 1(a)")
    assert rows_of(figure)["1"].items() <= rows["1"].items()  # the same setting


@pytest.mark.parametrize("name", ["insteval", "movielens"])
def test_what_natural_users_lose_is_told_of_the_least_epsilon_too(name):
    text = text_of(f"docs/results/{name}.md")
    (constant,) = re.findall(r"constant has an error of ([\d.]+)\.", text.replace("\n", " "))
    (row,) = re.findall(rf"^\| \[{name}\]\(.*", text_of(FOUND), re.M)
    runs = runs_of(ROOT / f"docs/results/{name}.csv")
    errors = [
        statistics.fmean(float(run["score"]) for run in runs[series, epsilon])
        for series in ("every pair, shuffler's blankets", "every pair, sums (users' noise)")
        for epsilon in ("1", "4")
    ]
    assert [f"{error:.3f}" for error in errors] == re.findall(r"[\d.]{5}", row)[2:]
    assert row.count("worse") == sum(error > float(constant) for error in errors)
