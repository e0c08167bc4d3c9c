"""`shufl report`: pages of real runs and of a grid, opened in a browser where there is one."""

import html.parser
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

import figure_1b
import report_picture
import shufl
from report_picture import CHROMIUM, browse
from run_world import invoke, json_lines, only_folder, summary_of, told
from shufl.accounting import ACCOUNTANTS, PrivacyPlan
from shufl.cli.experiment import page_of
from shufl.learning.data.datasets import load_dataset
from shufl.protocol.text import rounded_up
from shufl.results.plots import draw, plot_rounds, plot_score_epsilon
from shufl.results.run_folder import note_start, read_rows, read_starts
from shufl.results.tables import AS_PLANNED, epsilon_text
from shufl.simulator.grid.definition import Grid
from shufl.simulator.grid.grid_page import keep_grid, write_page
from shufl.simulator.grid.grid_points import play

browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
ROOT = Path(__file__).resolve().parents[2]
SAME_ANSWER = "the best answer that is the same for all records"
HOSTILE = "<img src=x onerror=document.title=1>"
SETTINGS = {
    "simulation.engine": "vectorised",
    "privacy.rounds": 4,
    "data.users": 200,
    "privacy.minimum_batch": 1,
    "privacy.target_epsilon": 1e6,
    "about.purpose": HOSTILE,
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    sets = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    command = ["run", "quickstart", "--runs", str(runs), *sets]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bin/shufl", *command])  # which the page shows
        done = invoke(*command)
    assert done.exit_code == 0, done.output
    return only_folder(runs)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of four points two that were played, one that failed, and one that is missing."""
    folder = tmp_path_factory.mktemp("results") / "tiny"
    grid = Grid(
        title=HOSTILE,
        about="One paragraph\nof two lines.\n\n- a <b>point</b>",
        base="quickstart",
        settings=SETTINGS,
        across="privacy.noise_multiplier",
        label="z",
        values=[1.0, 3.0],
        seeds=[3],
        series=[{"name": "<script>alert(1)</script>"}, {"name": "other"}],
    )
    points = grid.points()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bin/shufl", "experiment", "<tiny>"])
        for point in points[:2]:
            play(point, folder / point.key, 1)
    keep_grid(grid, folder, {str(points[2]): "no <i>luck</i>"})
    return folder


class Seen(html.parser.HTMLParser):
    """The text of a page, and its elements with what they load."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.loaded = "", set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.text += " "  # else a name and its value would be one word
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data):
        self.text += data


def check_alone(page):
    """That a page loads nothing and runs nothing."""
    seen = Seen(page)
    assert not seen.tags & {"script", "link", "iframe", "object", "b", "i"}
    assert all(value.startswith("data:image/svg+xml;base64,") for value in seen.loaded)
    assert "url(" not in page and "@import" not in page
    return seen.text


@pytest.mark.slow
def test_the_page_of_a_run_says_what_the_run_says(run_folder, tmp_path):
    target = tmp_path / "page.html"
    done = invoke("report", run_folder, "--output", target)
    assert (done.exit_code, done.stdout) == (0, f"written: {target}\n")
    text = check_alone(target.read_text())
    summary = summary_of(run_folder)
    assert f"{summary['accuracy']:.2%}" in text
    for name, row in summary["epsilon"].items():
        assert name in text and row["covers"] in text and epsilon_text(row["epsilon"]) in text
    assert (run_folder / "config.toml").read_text().strip() in text
    assert f"torch {summary['versions']['torch']}" in text
    assert "from seed 7: a simulation, which protects nobody" in text
    assert re.search(r"rounds spent\s*4\s*released\s*4", text)
    epsilons = {name: epsilon_text(row["epsilon"]) for name, row in summary["epsilon"].items()}
    (start,) = read_starts(run_folder)
    head = re.sub(r"\s+", " ", text[: text.index("The ε that ends the run")])
    assert re.search(
        rf"halting ε {epsilons['theorem3']} by theorem3, homogeneous pair "
        rf"least ε for every pair {epsilons['blanket']} by blanket, every pair .*"
        "data digits, 200 users, iid model logistic-regression algorithm fedsgd, sgd versions .* "
        rf"command shufl run quickstart --runs .* commit {re.escape(start['commit']) or 'unknown'} "
        rf"date {re.escape(start['date'])}",
        head,
    )
    assert "noise_multiplier" not in text.replace((run_folder / "config.toml").read_text(), "")
    assert re.search(r"noise multiplier z\s*1\s", text)
    assert target.read_text().count("data:image/svg+xml") == 2
    assert not re.search(r"\b(None|True|False)\b", text)


def first_page(folder):
    """The first page of a report, its words with a space between them."""
    text = check_alone(page_of(folder))
    return re.sub(r"\s+", " ", text[: re.search(r"The runs? in numbers", text).start()])


def bounds(epsilon, delta):
    """How often a guess of two equally likely possibilities is right, by Kairouz, Oh, Viswanath."""
    advantage = (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)
    return 50 * (1 + advantage)


@pytest.mark.slow
def test_the_first_page_of_a_run_is_in_plain_words(run_folder):
    text, summary = first_page(run_folder), summary_of(run_folder)
    epsilons = {name: row["epsilon"] for name, row in summary["epsilon"].items()}
    assert f"purpose {HOSTILE} contact not stated" in text
    said = "logistic-regression was trained on digits, data of 200 people with 1,437 records"
    assert said in text
    assert "in 4 rounds. In each round each person takes part with a probability of 50%" in text
    assert "It protected nobody" in text and "not somebody whom the data name" in text
    assert f"ε, which ends the run {epsilon_text(epsilons['theorem3'])} by theorem3" in text
    assert f"ε for every person {epsilon_text(epsilons['blanket'])} by blanket δ 1 in 200" in text
    sure, odds = re.search(
        r"most (\S+)% if both .*? e\^ε = (\S+) times .*? plus 1 in 200", text
    ).groups()
    exact = math.exp(epsilons["blanket"]), bounds(epsilons["blanket"], 1 / 200)
    assert exact[0] <= float(odds) <= 1.001 * exact[0]
    assert exact[1] <= float(sure) <= exact[1] + 0.1
    assert "theorem3, whose ε ends the run, looks at the homogeneous pair alone" in text
    assert "promises nothing to real people. For that pair the guess is right" in text
    assert "honest, for the ε of blanket" in text
    assert "adds updates of nobody, which are noise alone" in text
    assert "The 360 records that the model was tested on" in text
    labels = load_dataset("digits").test_labels.tolist()
    constant = max(labels.count(label) for label in labels) / len(labels)
    assert f"this model {summary['accuracy']:.2%} {SAME_ANSWER} {constant:.2%}" in text
    assert text.endswith("the same training without privacy not measured ")


@pytest.mark.slow
def test_the_first_page_names_whom_the_halting_accountant_trusts(run_folder, tmp_path):
    """Before the first round, by plans whose ε holds for every pair."""
    folder = shutil.copytree(run_folder, tmp_path / "run")
    (folder / "ledger.jsonl").unlink()
    for name in ("metrics.jsonl", "checkpoint.pt", "summary.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "tensorboard")
    plan = json.loads((folder / "plan.json").read_bytes())
    plan |= {"adjacency": "zero-out", "delta": 1e-5}
    sums = {"mixing": "sum", "central_noise": 9.0, "shuffler_blankets": 0.0}
    no_noise = {"mechanism": plan["mechanism"] | {"noise_multiplier": 0.0}}
    window = {"work_until": 1.0, "send_after": 2.0, "send_spread": 0.0, "grace": 1.0}
    window |= {"answer_every": 0.5, "query_every": 1.0, "most_records": 9}
    for halting, trusted, changed in (
        ("local", "device: it adds the noise before anything leaves it. What is not", {}),
        ("crowd", "The devices of 200 people: each adds its own noise", {}),
        ("blanket", "tells nobody how many. Whoever runs it sees no model", {"window": window}),
        ("sum-central", "The shuffler or the server: at least one of them adds its noise", sums),
        ("sum-distributed", "in every round. The shuffler or the server: at least one", sums),
        ("sum-distributed", "The operators of shuffler and server", sums | {"central_noise": 0.0}),
        ("sum-central", "bounds the update and hides it before anything", sums | no_noise),
    ):
        changed = plan | {"accountant": halting, "cover": True} | changed
        (folder / "plan.json").write_text(json.dumps(changed))
        text = first_page(folder)
        assert f"honest, for the ε of {halting}" in text and trusted in text
        assert "whether one person's records were used, or nothing in their place" in text
        assert "homogeneous" not in text and SAME_ANSWER not in text
        assert "This was simulated on one machine" in text  # its seed is written down
        assert ("random noise on it" in text) == (changed["mechanism"]["noise_multiplier"] > 0)
        assert "δ 1 in 100,000" in text
        assert "this model not evaluated yet" in text


@pytest.mark.slow
def test_who_asks_and_what_for_may_be_changed_in_the_run_folder(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config + '\ncontact = "Ada"\n')
    assert "contact Ada" in first_page(folder)
    assert shufl.resume(folder, progress=False).stopped_by == "rounds"
    (folder / "config.toml").write_text(config + "\ncontact = 3\n")
    with pytest.raises(shufl.ConfigError, match=r"about\.contact must be text, got 3"):
        shufl.resume(folder, progress=False)


@pytest.mark.slow
def test_the_page_of_an_older_run_says_what_is_unknown(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "old")
    (tmp_path / "old/starts.jsonl").unlink()
    summary = summary_of(tmp_path / "old")
    for key in ("records", "test_records", "constant"):
        del summary[key]
    (tmp_path / "old/summary.json").write_text(json.dumps(summary))
    text = check_alone(page_of(tmp_path / "old"))
    assert re.search(r"command\s*unknown\s*commit\s*unknown\s*date\s*unknown", text)
    assert "data of 200 people, in 4 rounds" in re.sub(r"\s+", " ", text)
    assert SAME_ANSWER not in text and "The records that the model" in re.sub(r"\s+", " ", text)


def test_a_token_on_the_command_line_of_another_program_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bin/flwr-serverapp", "--token", "secret"])
    note_start(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bin/shufl", "run", "--resume", "a run"])
    note_start(tmp_path)
    told = [start["command"] for start in read_starts(tmp_path)]
    assert told == ["flwr-serverapp", "shufl run --resume 'a run'"]


@pytest.mark.slow
def test_plots_can_be_read_without_colour_and_no_legend_covers_a_curve(run_folder, tmp_path):
    plan = PrivacyPlan.from_json((run_folder / "plan.json").read_bytes())
    rows = read_rows(run_folder / "metrics.jsonl")
    figures = [
        plot_score_epsilon(rows, plan, tmp_path / "plot.svg"),
        plot_rounds(rows, tmp_path / "rounds.svg"),
    ]
    for figure in figures:
        (legend,) = figure.legends
        assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())
    axes = figures[0].axes[0]
    assert axes.get_xlabel().endswith("log scale") and "scale" not in axes.get_ylabel()
    *curves, _ = axes.get_lines()
    assert len({curve.get_marker() for curve in curves}) == len(curves) == len(rows[0]["epsilons"])
    for curve in curves:
        name, pairs = curve.get_label().split(", ")
        assert pairs == ACCOUNTANTS[name].holds_for
        assert curve.get_linestyle() == ("-" if pairs == "every pair" else "--")


@pytest.mark.slow
def test_a_run_that_was_interrupted_is_told_as_such(run_folder, tmp_path):
    """Three rounds are spent; of the third there is no row, and nothing was evaluated yet.

    The summary is of an earlier end, after two rounds.
    """
    folder = tmp_path / HOSTILE
    shutil.copytree(run_folder, folder)
    whole = summary_of(folder)
    assert not any("planned" in row for row in whole["epsilon"].values())
    assert "as planned" not in page_of(folder)
    rows = json_lines(folder / "metrics.jsonl")[:2]
    rows = [row | {"accuracy": None, "loss": None} for row in rows]
    cut = json.dumps(rows[0])[:50]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows) + cut)
    (folder / "checkpoint.pt").unlink()
    shutil.rmtree(folder / "tensorboard")
    summary = summary_of(folder) | {"rounds": 2}
    (folder / "summary.json").write_text(json.dumps(summary))
    ledger = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(ledger[:4]))
    text = check_alone(page_of(folder))
    assert HOSTILE in text
    assert "not finished when this was made" in text and "not evaluated yet" in text
    assert re.search(r"rounds spent\s*3\s*released\s*2\s*spent, without a row\s*1", text)
    priced = told("account", folder, "--accountant", "all")["epsilon"]
    for name in ("blanket", "pld"):
        assert epsilon_text(priced[name]["epsilon"]) in text
    planned = {name: epsilon_text(row["epsilon"]) for name, row in whole["epsilon"].items()}
    assert {name: epsilon_text(row["planned"]) for name, row in priced.items()} == planned
    assert "ε so far" in text and "ε as planned" in text and AS_PLANNED in text
    halting = epsilon_text(priced["theorem3"]["epsilon"])
    assert f"{halting} so far, {planned['theorem3']} as planned" in text
    plan = json.loads((folder / "plan.json").read_bytes())
    (folder / "plan.json").write_text(json.dumps(plan | {"accountant": "blanket"}))
    text = check_alone(page_of(folder))  # where too few may have been there, nothing counts on them
    assert epsilon_text(priced["blanket"]["epsilon"]) in text
    assert epsilon_text(priced["pld"]["epsilon"]) not in text
    for name in ("metrics.jsonl", "ledger.jsonl", "summary.json"):  # before the first round
        (folder / name).unlink()
    assert re.search(r"rounds spent\s*0", check_alone(page_of(folder)))


@pytest.mark.slow
def test_the_page_of_a_grid_has_its_numbers_and_what_is_missing(results):
    done = invoke("report", results)
    assert done.exit_code == 0, done.stderr
    text = check_alone((results / "report.html").read_text())
    assert HOSTILE in text and "One paragraph of two lines." in text and "<b>point</b>" in text
    played = [json.loads(path.read_bytes()) for path in sorted(results.glob("*/result.json"))]
    assert len(played) == 2
    for result in played:
        assert f"{100 * result['score']:.2f}" in text
        assert epsilon_text(result["epsilon"]["blanket"]) in text
    assert "2 of 4" in text and "shufl experiment '<tiny>'" in text
    halting, every_pair = (
        sorted((result["epsilon"][name] for result in played), key=float)
        for name in ("theorem3", "blanket")
    )
    head = re.sub(r"\s+", " ", text[text.index("in numbers") : text.index("One paragraph")])
    for said, name, ends in (
        ("halting ε", "theorem3", halting),
        ("ε for every pair", "blanket", every_pair),
    ):
        least, most = map(epsilon_text, ends)
        assert f"{said} {least} ({name}) to {most} ({name})" in head
    assert "data digits, 200 users model logistic-regression algorithm fedsgd" in head
    assert re.search(rf"commit .* date {played[0]['date'][:10]}", head)
    assert "other, 1, seed 3: no <i>luck</i>" in text
    assert re.search(r"missing\s*other, 3, seed 3", text)
    text, scores = first_page(results), [f"{result['score']:.2%}" for result in played]
    assert f"purpose {HOSTILE}" in text and "2 runs trained logistic-regression on digits" in text
    assert f"ε for every person {epsilon_text(every_pair[0])} (blanket) to" in text
    assert f"e^ε = {rounded_up(math.exp(every_pair[1]))} times" in text
    assert "theorem3, whose ε ends runs, looks at the homogeneous pair alone" in text
    assert f"<script>alert(1)</script> {min(scores)} to {max(scores)} {SAME_ANSWER} 12." in text


def test_the_page_of_a_grid_of_which_every_run_failed_says_why(results, tmp_path):
    shutil.copy(results / "grid.json", tmp_path)
    text = check_alone(page_of(tmp_path))
    assert "0 of 4" in text and "other, 1, seed 3: no <i>luck</i>" in text
    grid = Grid.model_validate(json.loads((tmp_path / "grid.json").read_bytes())["grid"])
    page = write_page("x", grid, grid.points(), tmp_path, tmp_path / "pages", {"a, 1": "bad luck"})
    assert "a, 1: bad luck" in page.read_text()
    assert not page.with_suffix(".svg").exists()


@pytest.mark.slow
def test_a_score_that_is_no_number_is_told_as_such(run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    rows = [row | {"accuracy": None} for row in read_rows(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = summary_of(folder)
    (folder / "summary.json").write_text(json.dumps(summary | {"accuracy": None}))
    assert "not a number" in check_alone(page_of(folder))
    run = shufl.load_run(folder)
    assert math.isnan(run.score) and run.stopped_by == summary["stopped_by"]
    plan = PrivacyPlan.from_json((folder / "plan.json").read_bytes())
    for score in (math.nan, math.inf):  # as a run has them before they are written
        told = [row | {"accuracy": score} for row in rows]
        assert plot_score_epsilon(told, plan, tmp_path / "plot.svg").axes


def test_a_plot_shows_your_words_as_they_are(tmp_path):
    with draw(tmp_path / "plot.svg") as axes:
        axes.bar(["a$^$b", "$0 to $9"], [1, 2], label="$^$")
        axes.set(title="$^$")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a$^$b", "$0 to $9"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, "", "must be a run folder, which has a plan.json, or the folder of an experiment"),
        ("plan.json", "{}", "privacy plan: users is missing"),
        ("grid.json", "{", "has a damaged file: Expecting property name"),
        ("grid.json", '{"grid": {}, "failed": {}}', "title is missing"),
    ],
)
def test_what_cannot_be_shown_is_one_line(tmp_path, file, content, message):
    if file:
        (tmp_path / file).write_text(content)
    done = invoke("report", tmp_path)
    assert done.exit_code != 0
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_the_page_of_a_run_needs_no_torch(run_folder):
    """A report is wanted at once, as is a status, and torch takes seconds to import."""
    code = (
        "import pathlib, sys; from shufl.cli.experiment import page_of; "
        "import shufl.deploy.run_status; "
        "page_of(pathlib.Path(sys.argv[1])); print({'torch', 'flwr', 'ray'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, run_folder]
    assert subprocess.check_output(command, text=True) == "set()\n"


@pytest.mark.slow
@browser
@pytest.mark.parametrize(
    ("what", "width"),
    [
        ("run_folder", 390),
        ("results", 1200),
        pytest.param("run_folder", 1200, marks=pytest.mark.nightly),
        pytest.param("results", 390, marks=pytest.mark.nightly),
    ],
)
def test_a_browser_shows_it_whole_on_a_phone_and_a_screen(what, width, request, tmp_path):
    """Inside a frame of that width nothing sticks out, and every image has a size.

    Where a table is wider and scrolls, ε or accuracy stands in view.
    """
    page = page_of(request.getfixturevalue(what))
    measured = measure(tmp_path, page, width)
    assert width - 20 <= measured["width"] <= width  # a scroll bar may take some
    assert measured["heads"] and max(measured["heads"].values()) <= width
    assert measured["images"] and min(measured["images"]) > 0.8 * min(width, 700)
    wide = page.replace("</body>", "<p style='width: 2000px'>wide</p></body>")
    assert measure(tmp_path, wide, width)["width"] > 1900
    (tmp_path / "page.html").write_text(page)
    for scheme, least, most in (("light", 0.8, 1.0), ("dark", 0.0, 0.2)):
        shot = tmp_path / f"{scheme}.png"
        size = f"--window-size={max(width, 500)},4000"
        browse(
            tmp_path / "page.html", f"--screenshot={shot}", size, *report_picture.SCHEMES[scheme]
        )
        bright = matplotlib.image.imread(shot)[..., :3].mean(axis=2) > 0.7
        assert least <= bright.mean() <= most, scheme  # figures are most of what is there


@pytest.mark.slow
@browser
@pytest.mark.parametrize("what", ["run_folder", "results"])
def test_a_print_fits_on_a4_and_its_first_page_is_in_plain_words(what, request, tmp_path):
    page = page_of(request.getfixturevalue(what))
    first = page[: page.index('<h2 class="page"')] + "</body></html>"
    for text, pages in ((first, {1}), (page, range(3, 12))):
        (tmp_path / "page.html").write_text(text)
        target = tmp_path / "page.pdf"
        browse(tmp_path / "page.html", f"--print-to-pdf={target}", "--no-pdf-header-footer")
        boxes = re.findall(rb"/MediaBox \[0 0 (\S+) (\S+)\]", target.read_bytes())
        assert len(boxes) in pages
        assert {(round(float(w)), round(float(h))) for w, h in boxes} == {(595, 842)}
    printed = page.replace("@media print", "@media all").replace("@media screen", "@media not all")
    assert printed.count("@media all") == printed.count("@media not all") == 1
    measured = measure(tmp_path, printed, 680)  # what the margins leave of A4
    assert measured["width"] <= 680
    assert measured["tables"] and all(inner <= outer for inner, outer in measured["tables"])


def measure(folder, page, width):
    """What a browser says of the page in a frame; its own rule against scripts is taken out."""
    alone, rules = re.subn(r"<meta http-equiv=.*?>", "", page, flags=re.S)
    assert rules == 1
    (folder / "page.html").write_text(alone.replace("</body>", MEASURE + "</body>"))
    frame = f'<iframe src="page.html" width="{width}" height="3000"></iframe>'
    (folder / "frame.html").write_text(FRAME + frame)
    options = "--dump-dom", "--virtual-time-budget=5000"
    shown = browse(folder / "frame.html", *options).stdout
    return json.loads(re.search(r"<title>(.*?)</title>", shown).group(1).replace("&quot;", '"'))


FRAME = "<!doctype html><title></title><script>onmessage = e => document.title = e.data</script>"
MEASURE = """<script>addEventListener("load", () => parent.postMessage(JSON.stringify({
    width: document.documentElement.scrollWidth,
    heads: Object.fromEntries([...document.querySelectorAll("thead th")]
        .filter(head => /^(ε|halting ε|ε for every pair|its ε holds for|z)$/.test(head.innerText))
        .map(head => [head.innerText, head.getBoundingClientRect().right])),
    tables: [...document.querySelectorAll(".wide")].map(e => [e.scrollWidth, e.clientWidth]),
    images: [...document.images].map(image => image.getBoundingClientRect().width),
}), "*"))</script>"""


@pytest.mark.slow
def test_the_page_of_figure_1b_tells_the_end_of_a_run(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figure_1b.py", str(run_folder), str(tmp_path)])
    figure_1b.main()
    page = (tmp_path / "figure-1b.md").read_text()
    last = json_lines(run_folder / "metrics.jsonl")[-1]
    assert f"| 4 | {last['accuracy']:.1%} | {last['epsilon']:.4g} |" in page
    assert (tmp_path / "figure-1b.svg").stat().st_size > 10_000
