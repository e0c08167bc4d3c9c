"""Making the log grow: refused calls, or connections that are none, in a loop."""

import json
import socket
import ssl
from collections import Counter

import grpc
import pytest

from shuffler_world import World, raw_channel, stub_of
from shufl.shuffler import ShufflerProcess
from shufl.shuffler.service.log import LINES_PER_MINUTE
from shufl.shuffler.wire import shuffler_pb2

CALLS = 5 * LINES_PER_MINUTE
REFUSED = "call without the right credential refused"


@pytest.mark.slow
def test_strangers_are_no_line_and_a_refused_node_in_a_loop_some_and_one_that_counts_the_rest(
    tmp_path,
):
    log = tmp_path / "log"
    with ShufflerProcess(log_file=log) as process:
        for _ in range(20):
            connect_without_a_certificate(process.address)
        assert process._tail() == ""
        assert [json.loads(line)["event"] for line in log.open()] == ["shuffler started"]
        world = World(process)
        with raw_channel(world) as channel:
            stub = stub_of("Control", channel)
            request = shuffler_pb2.EndRunRequest(run_id="run")
            for refused in [stub.EndRun.future(request) for _ in range(CALLS)]:
                assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
        world.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    written = Counter(line["event"] for line in lines)
    left_out = [line["left_out"] for line in lines if line.get("line") == REFUSED]
    # More than one minute's only where the test took so long.
    assert written[REFUSED] <= LINES_PER_MINUTE * (1 + len(left_out))
    assert written[REFUSED] + sum(left_out) == CALLS
    assert written["lines left out"] == len(left_out)
    assert lines[-1]["event"] == "shuffler stopped"


def connect_without_a_certificate(address):
    """Once without TLS, and once with."""
    host, _, port = address.partition(":")
    no_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    no_certificate.check_hostname, no_certificate.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while stranger.recv(4096):
            pass
    with socket.create_connection((host, int(port))) as stranger:
        try:
            with no_certificate.wrap_socket(stranger) as tls:
                tls.recv(4096)
        except ssl.SSLError as error:
            assert "CERTIFICATE_REQUIRED" in str(error)
