"""What the rows of a run say of rounds that a shuffler lost."""

import pytest

from rounds import make_plan
from shufl.protocol import RoundRecord
from shufl.results.rows import RunRecorder

PLAN = make_plan(
    users=100, check_in_rate=0.5, clip_norm=1.0, noise_multiplier=5.0, rounds=10, delta=1e-3,
    target_epsilon=10.0, minimum_batch=1, shuffler_blankets=50.0, accountant="blanket",
)  # fmt: skip


def record(outcome, crowd):
    return RoundRecord(
        round=1, epsilon=1.0, outcome=outcome, users_present=crowd, smallest_crowd=crowd,
        reports=0, rejected=0, reasons={}, silent_nodes=0, seconds=1.0,
        score="accuracy", metrics={"accuracy": None, "loss": None},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "crowd", "counted"),
    [("released", 100, True), ("released", 99, False), ("lost", 0, False), ("discarded", 0, True)],
)
@pytest.mark.slow
def test_a_lost_round_may_be_known_in_part_so_nobody_else_is_counted_on(
    tmp_path, outcome, crowd, counted
):
    recorder = RunRecorder(tmp_path, PLAN)
    recorder(record(outcome, crowd))
    recorder.close()
    assert (recorder.rows[0]["epsilons"]["crowd"] is not None) == counted
    assert recorder.rows[0]["epsilons"]["blanket"] is not None
