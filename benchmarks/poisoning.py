"""Poisoned reports: the accuracy that is left, by attack, share of attackers and aggregator.

Each run trains to the end of its budget, through the real client, a shuffler process of its own,
and the server's opening, aggregation and training. Only Flower, which carries the model, is left
out, and all users' updates are computed at once. The attackers hold credentials like everyone, and
know the model, the plan, the aggregator and all honest users' data.

    python benchmarks/poisoning.py quickstart \\
        --set privacy.target_epsilon=8 --set training.learning_rate=2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import multiprocessing
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord
from rich.table import Table
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from shufl.accounting import Ledger
from shufl.clients import Announcement, ClientSettings, Node, Simulated
from shufl.learning import UserRecords, user_updates
from shufl.learning.config import load
from shufl.protocol.console import Console
from shufl.protocol.mechanisms import clip, to_normals
from shufl.protocol.outcomes import RoundOutcome
from shufl.results.experiment import Experiment, prepare
from shufl.server import (
    MakeAggregator,
    Mean,
    PlayedRound,
    Training,
    TrainingSettings,
    aggregate_reports,
)
from shufl.shuffler import (
    ControlClient,
    Outcome,
    RoundHeader,
    ShufflerProcess,
    generate_key_pair,
    key_digest,
    model_digest,
    report_length,
    sealed_length,
)
from spectral_filter import SpectralFilter

ATTACKS = {
    "none": "nobody attacks",
    "huge": "a report of the largest numbers",
    "flip": "other labels, otherwise an honest user",
    "opposite": "an update of length C against the honest mean, with honest noise",
    "hidden": "as far against the honest mean as the filter hardly sees, with honest noise",
    "longest": "against the honest mean, no noise, as long as the norm test allows",
}


_LARGEST = 2**15 - 1  # entry of a report

AGGREGATORS: dict[str, MakeAggregator] = {"mean": Mean, "spectral-filter": SpectralFilter}


@dataclass(frozen=True)
class Case:
    """One run: who attacks how, against which aggregator."""

    attack: str
    share: float
    aggregator: str
    seed: int


class PoisoningNode(Node):
    """All users' client, of which some users send poisoned reports.

    It computes the updates of all users at once, for time, and because the attackers know them.
    """

    def __init__(self, settings: ClientSettings, case: Case, attackers: np.ndarray):
        super().__init__(settings)
        self._case, self._attackers = case, np.isin(np.arange(settings.plan.users), attackers)
        records = list(map(self._records, range(settings.plan.users)))
        self._sizes = torch.tensor([len(labels) for _, labels in records])
        longest = torch.arange(int(self._sizes.max()))
        self._everyone = tuple(  # who has fewer records gets some of them again, without weight
            torch.stack([each[longest % len(each)] for each in part])
            for part in zip(*records, strict=True)
        )
        self._round = 0

    def _reports(self, users: np.ndarray, round: int) -> Iterator[np.ndarray]:
        self._look_at(round)
        return (self._report(user, round) for user in users.tolist())

    def _report(self, user: int, round: int) -> np.ndarray:
        mechanism, against = self.settings.plan.mechanism, self._against
        (noise,) = self._randomness.standard_normal(round, np.array([user]), against.size)
        if not self._attackers[user] or self._case.attack in ("none", "flip"):
            return mechanism.report(self._updates[user], noise)
        match self._case.attack:
            case "huge":
                return np.full(against.size, _LARGEST, dtype=np.int16)
            case "opposite":
                return mechanism.report(mechanism.clip_norm * against, noise)
            case "hidden":
                noise = to_normals(noise) + self._hidden_length(against.size) * against
                return mechanism.report(np.zeros_like(against), noise)
            case _:
                longest = 0.999 * mechanism.largest_honest_norm(against.size) * against
                return np.rint(np.clip(longest, -_LARGEST, _LARGEST)).astype(np.int16)

    def _look_at(self, round: int) -> None:
        """Once a round: all users' updates, and the opposite of the honest mean, of length 1."""
        if round == self._round:
            return
        clip_norm = self.settings.plan.mechanism.clip_norm
        seeds = torch.arange(len(self._sizes))  # of nothing that is drawn
        given = *self._everyone, self.settings.training, seeds
        updates = user_updates(self._work.model, *given, real=self._sizes)
        self._updates = torch.cat([part.flatten(1) for part in updates.values()], 1).numpy()
        honest = (clip(each, clip_norm) for each in self._updates[~self._attackers])
        total = sum(honest, np.zeros(self._updates.shape[1]))
        self._round, self._against = round, -total / np.linalg.norm(total)

    def _hidden_length(self, dimension: int) -> float:
        """How many noise multipliers C a part shared by all attackers may be long.

        Either no report lies too far along it (C + 3zC), or it does not become the direction in
        which reports are longest: of k reports the noise alone makes one that is longer, by the
        law of Baik, Ben Arous and Péché 2005, if share * length^2 < sqrt(d / k).
        """
        plan = self.settings.plan
        reports = plan.users * plan.check_in_rate + plan.shuffler_blankets
        passes = 3 + 1 / plan.mechanism.noise_multiplier
        unseen = (dimension / reports) ** 0.25 / math.sqrt(self._case.share)
        return max(passes, unseen)


def run_case(config: str, overrides: list[str], case: Case) -> tuple[Case, float, float]:
    """Trains once; returns the case, the final test accuracy and the share of reports left out."""
    torch.set_num_threads(1)
    experiment = prepare(load(config, [*overrides, f"seed={case.seed}"]))
    plan = experiment.plan
    draw = np.random.default_rng(case.seed)
    attackers = draw.choice(plan.users, round(case.share * plan.users), replace=False)
    counts = []
    with (
        tempfile.TemporaryDirectory() as name,
        ShufflerProcess(simulation_seed=case.seed) as shuffler,
    ):
        folder, run_id = Path(name), f"poisoning-{uuid.uuid4()}"
        settings = ClientSettings(
            policy=Simulated(
                run_id=run_id,
                seed=experiment.seed,
                halting_round=experiment.halting_round,
                ledger=lambda node: None,
                together=True,
            ),
            plan=plan,
            make_model=experiment.make_model,
            load_users=functools.partial(_load_users, experiment, case, attackers),
            training=experiment.local_training,
            shufflers=((shuffler.address, shuffler.submit),),
            sealing="x25519",
        )
        node = PoisoningNode(settings, case, attackers)
        with (
            Ledger.create(folder / "ledger.jsonl", plan, run_id) as ledger,
            ControlClient(shuffler.address, shuffler.control) as control,
        ):
            training = Training(_training_settings(experiment, ledger, folder))
            kind = AGGREGATORS[case.aggregator]
            length = sealed_length(report_length(experiment.parameters))
            control.create_run(run_id, plan.to_json().encode(), length)
            for each in training.rounds():
                model = training.begin(each)
                played = _play(experiment, kind, node, control, run_id, each, model)
                record = training.end(each, played)
                counts.append((record.reports, record.rejected))
            result = training.finish()
    reports, rejected = np.sum(counts, axis=0)
    return case, result.metrics["accuracy"], float(rejected / (reports + rejected))


def _load_users(experiment: Experiment, case: Case, attackers: np.ndarray) -> UserRecords:
    """The users' records; with `flip` attackers count their classes from the other end."""
    records, classes = experiment.load_users(), experiment.dataset.classes

    def load(users: int | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        features, labels = records(users)
        if case.attack == "flip":
            attacked = torch.from_numpy(np.isin(users, attackers)).unsqueeze(-1)
            labels = torch.where(attacked, classes - 1 - labels, labels)
        return features, labels

    return load


def _training_settings(experiment: Experiment, ledger: Ledger, folder: Path) -> TrainingSettings:
    rounds = experiment.plan.rounds + 1  # evaluated and saved at the end alone
    return TrainingSettings(
        plan=experiment.plan,
        ledger=ledger,
        make_model=experiment.make_model,
        load_test=experiment.load_test,
        task=experiment.task,
        optimiser=experiment.optimiser,
        folder=folder,
        evaluate_every=rounds,
        checkpoint_every=rounds,
        origin={},
        reproducible=False,
        checkpoint=None,
    )


def _play(
    experiment: Experiment,
    make_aggregator: MakeAggregator,
    node: Node,
    control: ControlClient,
    run_id: str,
    round: int,
    model: nn.Module,
) -> PlayedRound:
    """One round, all users on one node."""
    plan, users = experiment.plan, np.arange(experiment.plan.users)
    state, (private_key, public_key) = model.state_dict(), generate_key_pair()
    header = RoundHeader(run_id, round, model_digest(state), plan.digest(), key_digest(public_key))
    nonce = control.open_round(header.run_id, round, header.model_digest, public_key)
    announced = Announcement(
        run_id=header.run_id,
        round=round,
        plan_digest=header.plan_digest,
        public_key=public_key,
        seconds=600.0,
    )
    node.take_part(users, node.prepare(announced, ArrayRecord(state)))
    if control.close_round(header.run_id, round).outcome is not Outcome.RELEASABLE:
        return PlayedRound(RoundOutcome.BELOW_MINIMUM, None, len(users), 0)
    aggregator = make_aggregator(plan, experiment.parameters)
    batch = dataclasses.replace(header, nonce=nonce), control.release(header.run_id, round)
    aggregate = aggregate_reports(
        batch, private_key, plan, experiment.parameters, aggregator, len(users)
    )
    control.end_round(header.run_id, round)
    return PlayedRound(RoundOutcome.RELEASED, aggregate, len(users), len(users))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.1])
    parser.add_argument("--aggregators", nargs="+", default=list(AGGREGATORS), choices=AGGREGATORS)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    shares = {"none": [0.0], "huge": [max(arguments.shares)]}  # of others too it would be the same
    settings = [
        (attack, share)
        for attack in arguments.attacks
        for share in shares.get(attack, arguments.shares)
    ]
    cases = [
        Case(attack, share, aggregator, seed)
        for attack, share in settings
        for aggregator in arguments.aggregators
        for seed in range(arguments.seeds)
    ]
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    run = functools.partial(run_case, arguments.config, arguments.set)
    results: dict[tuple[str, float, str], list[tuple[float, float]]] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for done, (case, *numbers) in enumerate(pool.imap(run, cases), 1):
            results.setdefault((case.attack, case.share, case.aggregator), []).append(numbers)
            print(f"\r{done}/{len(cases)} runs", end="", file=sys.stderr)
    print(file=sys.stderr)
    Console().print(_table(arguments, settings, results))


def _table(arguments: argparse.Namespace, settings: list, results: dict) -> Table:
    table = Table(title=f"{arguments.config}: test accuracy, mean (lowest, highest); left out")
    for column in ("attack", "share", *arguments.aggregators):
        table.add_column(column, justify="right")
    for attack, share in settings:
        cells = []
        for aggregator in arguments.aggregators:
            accuracies, left_out = np.transpose(results[attack, share, aggregator])
            low, high = accuracies.min(), accuracies.max()
            cells.append(f"{accuracies.mean():.1%} ({low:.1%}, {high:.1%}); {left_out.mean():.2%}")
        table.add_row(attack, f"{share:.0%}", *cells)
    return table


if __name__ == "__main__":
    main()
