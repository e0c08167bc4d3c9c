"""One credential that makes thousands of calls, or calls that outlive it."""

import asyncio

import grpc
import pytest

from run_world import LIMIT, peak_bytes, wait_until
from shuffler_world import Silence, World, pass_days, raw_channel
from shufl.shuffler import ControlClient, ShufflerProcess, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.config import Limits
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS

CALLS, CHANNELS = 2000, 10
LIMITS = {"calls": Limits().calls, "calls_per_sender": Limits().calls_per_sender}
BYTES = 20_000
"""So much memory a call takes where each is kept; half of it would be too much."""


@pytest.fixture(scope="module")
def attacked():
    """A shuffler, and the credential of who attacks it."""
    authority = Authority.create()
    with ShufflerProcess(authority=authority, limits=LIMITS) as process:
        world = World(process)
        yield world, authority.issue(Role.NODE, "attacker", users=1)
        world.close()


async def call_often(address, own, method, begun):
    """Opens many calls at once, and keeps those that the shuffler lets it keep.

    Returns when it has ended the others; `begun` is set when the first has been.
    """
    tls = grpc.ssl_channel_credentials(own.authority, own.private_key, own.certificate)
    channels = [grpc.aio.secure_channel(address, tls, CHANNEL_OPTIONS) for _ in range(CHANNELS)]
    calls = [channels[n % CHANNELS].stream_stream(method)() for n in range(CALLS)]
    ends = [asyncio.create_task(call.code()) for call in calls]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    begun.set()
    # Those that it keeps may be all that one channel may have open: then its others wait.
    while sum(not end.done() for end in ends) > CALLS // CHANNELS:
        await asyncio.wait([end for end in ends if not end.done()], return_when="FIRST_COMPLETED")
    for channel in channels:
        await channel.close()
    await asyncio.wait(ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check", "/shufl.v1.Intake/Submit"],
)
def test_thousands_of_calls_of_one_node_keep_nobody_out_and_take_no_memory(attacked, method):
    world, attacker = attacked
    header = world.begin(run_id=method)
    reports = world.reports(header, 50)
    assert world.submit(header, reports[:25]) == [Verdict.ACCEPTED] * 25
    before = peak_bytes(world.process.pid, anew=True)

    async def attack():
        begun = asyncio.Event()
        flood = call_often(world.process.address, attacker, method, begun)
        calls = asyncio.create_task(flood)
        await asyncio.wait_for(begun.wait(), LIMIT)
        verdicts = await asyncio.to_thread(world.submit, header, reports[25:])
        assert verdicts == [Verdict.ACCEPTED] * 25
        await asyncio.wait_for(calls, LIMIT)

    asyncio.run(attack())
    assert peak_bytes(world.process.pid) - before < CALLS * BYTES / 2


@pytest.mark.slow
def test_calls_that_are_open_when_their_certificate_expires_are_ended(here, monkeypatch):
    """A call that says nothing, and a release that is not read."""
    authority = Authority.create()
    world = here(authority=authority)
    header = world.begin(report_bytes=2**20, users=40)
    world.submit(header, [(user, bytes(2**20)) for user in range(40)])
    node = authority.issue(Role.NODE, "node", users=1, days=1)
    server = authority.issue(Role.SERVER, "server", days=1)  # the same name: the run's owner
    quiet = Silence()
    with (
        raw_channel(world, node) as channel,
        ControlClient(world.process.address, server) as control,
    ):
        answers = channel.stream_stream("/shufl.v1.Intake/Submit")(iter(quiet), timeout=LIMIT)
        callers = world.process._server._gate.permitted._callers
        wait_until(
            lambda: "node" in [each.name for each in list(callers.values())], LIMIT, "a call"
        )
        control.close_round("run", 1)
        release = control.release("run", 1)
        next(release)
        pass_days(monkeypatch, 1)
        with pytest.raises(grpc.RpcError) as ended:
            next(answers)
        assert ended.value.details() == "NOT_PERMITTED: not with this certificate"
        quiet.let_go.set()
        with pytest.raises(Exception, match="not with this certificate"):
            list(release)
