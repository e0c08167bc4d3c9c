"""A node that would report once at each of several shufflers, as they are provisioned."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from deployment_world import deployment_of
from shuffler_world import World, refusal
from shufl.deploy.rehearse import Rehearsal
from shufl.shuffler import Credentials, Refusal, Verdict


@pytest.mark.slow
def test_a_node_reports_at_its_own_shuffler_alone(tmp_path, warm_deployment):
    """All of them trust one authority."""
    deployment = deployment_of(tmp_path, nodes=2, rounds=2, shufflers=2)
    sites = Rehearsal(deployment, tmp_path, tmp_path / "s")

    def credentials(name):
        return Credentials.read(sites.folder / name / "keys", name)

    try:
        for shuffler in sites.deployment.shufflers:
            sites.start(shuffler.name, "shuffler")
            sites.wait_for_port(shuffler.port)
            for node in ("ward-1", "ward-2"):
                about = {"control": credentials("server"), "submit": credentials(node)}
                address = f"127.0.0.1:{shuffler.port}"
                with closing(World(SimpleNamespace(address=address, **about))) as world:
                    header = world.begin(node, users=6)
                    if node[-1] == shuffler.name[-1]:
                        verdicts = world.submit(header, world.reports(header, 4))
                        assert verdicts == [Verdict.ACCEPTED] * 3 + [Verdict.BAD_SENDER]
                        continue
                    refused = refusal(world.submit, header, world.reports(header, 3))
                    assert refused is Refusal.NOT_PERMITTED
    finally:
        sites.__exit__()
