"""Figure 1(b) of "Shuffle Gaussian Mechanism for Differential Privacy": accuracy against ε.

    shufl run mnist --engine vectorised --set simulation.noise=aggregate \\
        --set privacy.clip_norm=0.01 --set training.learning_rate=3 \\
        --set training.evaluate_every=50
    python benchmarks/figure_1b.py runs/mnist-… docs/results

The run takes half an hour on two cores. The script writes figure-1b.md and figure-1b.svg.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from shufl.accounting import Ledger, PrivacyPlan, accountants_for
from shufl.learning.config import load
from shufl.results.plots import plot_score_epsilon
from shufl.results.rows import read_rows
from shufl.results.tables import epsilon_text

PUBLISHED_ACCURACY = 80

TEXT = """# Figure 1(b): accuracy against ε on MNIST

```console
$ shufl run mnist --engine vectorised --set simulation.noise=aggregate \\
    --set privacy.clip_norm=0.01 --set training.learning_rate=3 --set training.evaluate_every=50
$ python benchmarks/figure_1b.py runs/mnist-… docs/results
```

The setting of the paper: {users} users with one record each, γ = {rate:g}, σ = {noise:g},
C = {clip:g}, a small CNN of {parameters} parameters, no features, no blankets, {adjacency}
adjacency, δ = 1/n; one run, with seed {seed}, torch {torch} and Python {python}. The paper ends
with about {printed} %. Here it is {accuracy:.1f} %, at ε = {epsilon} by Theorem 3; that ε is ours.

The other accountants price the same run: `theorem3`, `rdp` and `pld` for the homogeneous pair,
`crowd` and `local` for every pair. `blanket` counts on blankets, and so has no number here; what
they and features bring is on [the page of MNIST](mnist.md).

![Accuracy against ε](figure-1b.svg)

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    plan: PrivacyPlan = Ledger.read(given.run / "ledger.jsonl").plan
    rows = read_rows(given.run / "metrics.jsonl")
    rows[-1]["accuracy"] = json.loads((given.run / "summary.json").read_text())["accuracy"]
    rows = [row for row in rows if row["accuracy"] is not None]
    plot_score_epsilon(rows, plan, given.folder / "figure-1b.svg")
    names = [name for name in accountants_for(plan.event()) if rows[-1]["epsilons"][name]]
    last = rows[-1]["round"]
    wanted = sorted({round(last ** (step / 10)) for step in range(3, 11)})
    near = [min(rows, key=lambda row: abs(row["round"] - each)) for each in wanted]
    shown = {row["round"]: row for row in near}
    heads = ["round", "accuracy", *names]
    lines = [heads, ["---:"] * len(heads)]
    for row in shown.values():
        epsilons = [epsilon_text(row["epsilons"][name]) for name in names]
        lines.append([str(row["round"]), f"{row['accuracy']:.1%}", *epsilons])
    model = torch.load(given.run / "model.pt", weights_only=True)
    text = TEXT.format(
        users=plan.users,
        rate=plan.check_in_rate,
        noise=plan.mechanism.noise_multiplier,
        clip=plan.mechanism.clip_norm,
        parameters=sum(each.numel() for each in model.values()),
        adjacency=plan.adjacency,
        seed=load(str(given.run / "config.toml")).seed,
        torch=torch.__version__,
        python=platform.python_version(),
        printed=PUBLISHED_ACCURACY,
        accuracy=100 * rows[-1]["accuracy"],
        epsilon=epsilon_text(rows[-1]["epsilon"]),
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
    )
    (given.folder / "figure-1b.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
