"""A node that would report once at each of several shufflers, as they are provisioned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deployment_world import deployment_of
from shuffler_world import World
from shufl.deploy.rehearse import Rehearsal
from shufl.shuffler import Credentials, Refusal, ShufflerRefused, Verdict

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("node", "own"), [("ward-1", "shuffler-1"), ("ward-2", "shuffler-2")])
def test_a_node_reports_at_its_own_shuffler_alone(tmp_path, warm_deployment, node, own):
    """All of them trust one authority."""
    deployment = deployment_of(tmp_path, nodes=2, rounds=2, shufflers=2)
    sites = Rehearsal(deployment, tmp_path, tmp_path / "s")
    node, server = (
        Credentials.read(sites.folder / name / "keys", name) for name in (node, "server")
    )
    try:
        for shuffler in sites.deployment.shufflers:
            sites.start(shuffler.name, "shuffler")
        for shuffler in sites.deployment.shufflers:
            sites.wait_for_port(shuffler.port)
            address = f"127.0.0.1:{shuffler.port}"
            world = World(SimpleNamespace(address=address, control=server, submit=node))
            header = world.begin(users=6)
            if shuffler.name == own:
                verdicts = world.submit(header, world.reports(header, 4))
                assert verdicts == [Verdict.ACCEPTED] * 3 + [Verdict.BAD_SENDER]
                continue
            with pytest.raises(ShufflerRefused) as refused:
                world.submit(header, world.reports(header, 3))
            assert refused.value.reason is Refusal.NOT_PERMITTED
            world.close()
    finally:
        sites.__exit__()
