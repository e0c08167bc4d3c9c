"""One credential that makes thousands of calls, or calls that outlive it."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import grpc
import pytest

from shuffler_world import Silence, World, raw_channel
from shufl.shuffler import ControlClient, Refusal, ShufflerProcess, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority, Credentials
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS
from shufl.shuffler.wire.stub import Stub

CALLS, CHANNELS = 5000, 10
LIMITS = {"calls_per_sender": 32, "streams_per_sender": 4}


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def call_often(address: str, own: Credentials, method: str, hold: asyncio.Event) -> None:
    """Opens many calls at once and keeps those that the shuffler lets it keep."""
    tls = grpc.ssl_channel_credentials(own.authority, own.private_key, own.certificate)
    channels = [grpc.aio.secure_channel(address, tls, CHANNEL_OPTIONS) for _ in range(CHANNELS)]
    calls = [channels[n % CHANNELS].stream_stream(method)() for n in range(CALLS)]
    if method.endswith("Watch"):
        writes = [asyncio.create_task(call.write(b"")) for call in calls]
        await asyncio.wait(writes, timeout=5)
    await hold.wait()
    for channel in channels:
        await channel.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check", "/shufl.v1.Intake/Submit"],
)
def test_thousands_of_calls_of_one_node_keep_nobody_out_and_take_no_memory(method: str):
    authority = Authority.create()
    attacker = authority.issue(Role.NODE, "attacker", users=1)
    with ShufflerProcess(authority=authority, limits=LIMITS) as process:
        world = World(process)
        header = world.begin()
        reports = world.reports(header, 50)
        assert world.submit(header, reports[:25]) == [Verdict.ACCEPTED] * 25
        before = peak_bytes(process.pid)

        async def attack() -> None:
            hold = asyncio.Event()
            calls = asyncio.create_task(call_often(process.address, attacker, method, hold))
            await asyncio.sleep(2)
            verdicts = await asyncio.to_thread(world.submit, header, reports[25:])
            assert verdicts == [Verdict.ACCEPTED] * 25
            hold.set()
            await calls

        asyncio.run(attack())
        assert peak_bytes(process.pid) - before < 50e6  # 100e6 where each call is kept
        world.close()


def test_calls_of_one_credential_are_limited_and_another_s_are_not():
    authority = Authority.create()
    many, one = (authority.issue(Role.MONITOR, name) for name in ("many", "one"))
    with ShufflerProcess(authority=authority, limits={"calls_per_sender": 2}) as process:
        world = World(process)
        quiet, channels, calls = Silence(), [], []
        for _ in range(2):
            channels.append(raw_channel(world, many))
            calls.append(channels[-1].stream_stream("/grpc.health.v1.Health/Check")(iter(quiet)))
            grpc.channel_ready_future(channels[-1]).result(60)
        with raw_channel(world, one) as channel:
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
        channels.append(raw_channel(world, many))
        refused = None
        while refused is None:  # until both calls have arrived
            try:
                channels[-1].unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            except grpc.RpcError as error:
                refused = error
        assert refused.details() == f"{Refusal.BUSY}: too many calls at once"
        quiet.let_go.set()
        for channel in channels:
            channel.close()
        world.close()


@pytest.mark.slow
def test_calls_that_are_open_when_their_certificate_expires_are_ended():
    """A stream that says nothing, and a release that is not read."""
    authority = Authority.create()
    with ShufflerProcess(authority=authority) as process:
        world = World(process)
        header = world.begin(report_bytes=2**20, users=40)
        world.submit(header, [(user, bytes(2**20)) for user in range(40)])
        days = datetime.timedelta(seconds=6) / datetime.timedelta(days=1)
        node = authority.issue(Role.NODE, "node", users=1, days=days)
        server = authority.issue(Role.SERVER, "server", days=days)  # the same name: the run's owner
        quiet = Silence(shuffler_pb2.SubmitRequest(run_id="nobody", users=[0]))
        with raw_channel(world, node) as channel, ControlClient(process.address, server) as control:
            answers = Stub("Intake", channel).Submit(iter(quiet), timeout=60)
            assert len(next(answers).verdicts) == 1
            control.close_round("run", 1)
            release = control.release("run", 1)
            next(release)
            with pytest.raises(grpc.RpcError) as ended:
                next(answers)
            assert ended.value.details() == f"{Refusal.NOT_PERMITTED}: not with this certificate"
            quiet.let_go.set()
            with pytest.raises(Exception, match="not with this certificate"):
                list(release)
        world.close()
