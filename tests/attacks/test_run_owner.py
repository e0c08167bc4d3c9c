"""Another server's run: the caller has a server's certificate, but did not create the run."""

import pytest

from shuffler_world import PUBLIC_KEY, ShufflerHere, plan, refusal
from shufl.shuffler import ControlClient, Outcome, Refusal
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority


@pytest.fixture
def servers():
    """Clients of two servers of one authority, and of the first one's renewed certificate."""
    authority = Authority.create()
    with ShufflerHere(authority=authority) as process:
        names = ("own", "other", "own")
        clients = [
            ControlClient(process.address, authority.issue(Role.SERVER, name)) for name in names
        ]
        yield clients
        for client in clients:
            client.close()


def test_nobody_but_its_server_can_do_anything_with_a_run(servers):
    own, other, renewed = servers
    own.create_run("run", plan(), 100)
    own.open_round("run", 1, "m", PUBLIC_KEY)
    attempts = [
        lambda: other.create_run("run", plan(), 100),
        lambda: other.open_round("run", 2, "m", PUBLIC_KEY),
        lambda: other.close_round("run", 1),
        lambda: other.end_round("run", 1),
        lambda: list(other.release("run", 1)),
        lambda: other.end_run("run"),
    ]
    for attempt in attempts:
        assert refusal(attempt) is Refusal.NOT_OWNER
    renewed.create_run("run", plan(), 100)
    renewed.end_round("run", 1)
    assert own.close_round("run", 1).outcome is Outcome.DISCARDED
    renewed.end_run("run")
    other.create_run("another", plan(), 100)


def test_the_owner_is_kept_over_a_restart(tmp_path):
    authority = Authority.create()
    own, other = (authority.issue(Role.SERVER, name) for name in ("own", "other"))
    with (
        ShufflerHere(tmp_path / "directory", authority=authority) as process,
        ControlClient(process.address, own) as client,
    ):
        client.create_run("run", plan(), 100)
    with ShufflerHere(tmp_path / "directory", authority=authority) as process:
        with ControlClient(process.address, other) as client:
            assert refusal(client.end_run, "run") is Refusal.NOT_OWNER
        with ControlClient(process.address, own) as client:
            client.end_run("run")
