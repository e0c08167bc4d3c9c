"""A shuffler that is killed, restored from a backup or copied: what the old process had is gone.

Whoever runs it, or has its disk, would release a round twice, or collect its users' reports twice.
"""

import dataclasses
import os
import shutil

import pytest

from ports import free_port
from run_world import LIMIT
from shuffler_world import kill, open_batches, plan, refusal
from shufl.shuffler import (
    IntakeClient,
    Refusal,
    RejectReason,
    ReportOpener,
    ReportRejected,
    ShufflerUnavailable,
    Verdict,
    generate_key_pair,
    sealed_length,
)
from shufl.shuffler.keys import Authority
from shufl.shuffler.public_record import verify
from shufl.shuffler.wire.control_client import RecordClient

AUTHORITY, KEYS = Authority.create(), generate_key_pair()


def started(how, directory, **options):
    """A shuffler of one authority, and a server with one key, whichever process it is."""
    world = how(directory, authority=AUTHORITY, **options)
    world.private_key, world.public_key = KEYS
    return world


def entries(world):
    with RecordClient(world.process.address, world.process.monitor) as client:
        return verify(client.entries())


def events(world):
    return [(line["event"], line.get("round")) for line in entries(world)]


@pytest.mark.slow
def test_a_killed_shuffler_releases_nothing_of_what_it_had_taken(start, memory_path):
    """One round was closed, one is being released, one is open; and the disk is as it was."""
    place = memory_path / "directory"
    world = started(start, place)
    headers = {}
    for run, length in (("closed", 148), ("released", 2**20), ("open", 148)):
        headers[run] = header = world.begin(run, report_bytes=length, users=40)
        sent = [(user, os.urandom(length)) for user in range(20)]
        assert world.submit(header, sent) == [Verdict.ACCEPTED] * 20
    for run in ("closed", "released"):
        world.control.close_round(run, 1)
    release = world.control.release("released", 1)
    next(release)
    assert open_batches(world) == 3
    kill(world)
    with pytest.raises(ShufflerUnavailable):
        list(release)
    assert [path.name for path in place.iterdir()] == ["record.jsonl"]

    world = started(start, place)
    assert open_batches(world) == 0
    for run in ("closed", "open"):
        for call in (world.control.release, world.control.close_round):
            assert refusal(call, run, 1) is Refusal.BATCH_LOST
    assert refusal(world.control.release, "released", 1) is Refusal.ALREADY_RELEASED
    for run, header in headers.items():
        world.control.end_round(run, 1)
        assert world.submit(header, [(39, sent[0][1])]) == [Verdict.ROUND_NOT_OPEN]
    ended = [event for event in events(world) if event[0] not in ("created", "opened")]
    assert ended == [("released", 1), ("lost", 1), ("lost", 1)]
    header = world.begin("open", round=2, users=40, report_bytes=148)
    assert world.submit(header, [(0, bytes(148))]) == [Verdict.ACCEPTED]


@pytest.mark.slow
@pytest.mark.parametrize("length", [148, pytest.param(2**18 + 5, marks=pytest.mark.nightly)])
def test_a_report_on_its_way_when_the_shuffler_is_killed_is_in_no_batch(start, memory_path, length):
    """The client tries again by itself, and finds another process on the same address."""
    place, listen = memory_path / "directory", f"127.0.0.1:{free_port()}"
    world = started(start, place, listen=listen)
    header = world.begin(report_bytes=length, users=300)
    sent = [(user, os.urandom(length)) for user in range(300)]
    assert world.submit(header, sent[:20]) == [Verdict.ACCEPTED] * 20

    def reports():
        nonlocal world
        yield from sent[20:200]
        kill(world)  # while the last of those are on their way
        world = started(start, place, listen=listen)
        world.control.open_round("run", 2, "model 2", world.public_key)
        yield from sent[200:]

    with IntakeClient(listen, world.process.submit) as intake:
        verdicts = list(intake.submit(header, reports(), deadline=LIMIT))
    assert set(verdicts[:180]) <= {Verdict.ACCEPTED, Verdict.ROUND_NOT_OPEN}
    assert verdicts[180:] == [Verdict.ROUND_NOT_OPEN] * 100
    assert world.control.close_round("run", 2).outcome.name == "BELOW_MINIMUM"


@pytest.mark.parametrize("how", ["rolled back", "copied"])
def test_the_same_round_of_another_process_takes_none_of_the_old_one_s_reports(
    here, memory_path, how
):
    """A copy of the directory that was made before the round was opened knows nothing of it.

    The same server opens the same round on the same model with the same key: only the nonce is
    another, which no disk has.
    """
    place, copy = memory_path / "directory", memory_path / "copy"
    world = started(here, place)
    world.control.create_run("run", plan(), sealed_length(100))
    shutil.copytree(place, copy)
    old = world.begin()
    reports = world.reports(old, 4)
    assert world.submit(old, reports[:2]) == [Verdict.ACCEPTED] * 2
    if how == "rolled back":
        world.process.__exit__()
        shutil.rmtree(place)
        copy.rename(place)
        again = started(here, place)
    else:
        again = started(here, copy)  # while the first one goes on
    new = again.begin()
    assert (old.nonce, old.commitment) != (new.nonce, new.commitment)
    assert dataclasses.replace(old, nonce=new.nonce) == new
    assert again.submit(old, reports) == [Verdict.WRONG_COMMITMENT] * 4
    confirmed, _ = again.intake.agree(dataclasses.replace(old, nonce=b""))
    assert confirmed == new
    # Handed in as if they had been sealed for this round, they do not open.
    assert again.submit(new, reports) == [Verdict.ACCEPTED] * 4
    own = again.reports(new, 1, first=4)
    assert again.submit(new, own) == [Verdict.ACCEPTED]
    again.control.close_round("run", 1)
    opener, opened = ReportOpener(again.private_key), []
    for sealed in again.control.release("run", 1):
        try:
            opened.append(opener.open(sealed, new))
        except ReportRejected as rejected:
            assert rejected.reason is RejectReason.NOT_OPENED
    assert len(opened) == 1


def test_a_shuffler_that_went_back_shows_another_history(here, memory_path):
    """Whoever kept the check value of a round sees that it went back, though it opened it again."""
    place, backup = memory_path / "directory", memory_path / "backup"
    world, shown = started(here, place), []
    world.begin()
    world.process.__exit__()
    shutil.copytree(place, backup)
    for came_from in (place, backup):
        if came_from == backup:
            shutil.rmtree(place)
            backup.rename(place)
        world = started(here, place)
        world.begin(round=2)
        assert events(world) == [("created", None), ("opened", 1), ("lost", 1), ("opened", 2)]
        shown.append([line["check"] for line in entries(world)])
        world.process.__exit__()
    kept, again = shown
    assert kept[:-1] == again[:-1] and kept[-1] != again[-1]
