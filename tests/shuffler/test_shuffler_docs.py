"""What docs/shuffler.md tells an operator to do works as it is printed."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ports import free_port
from run_world import LIMIT
from shuffler_world import plan, refusal, scrape
from shufl.shuffler import ControlClient, Credentials, Refusal
from shufl.shuffler.config import ShufflerConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "shuffler.md").read_text(encoding="utf-8")
START = "shufl shuffler --config shuffler.toml"


def printed(language):
    return "".join(re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M))


@pytest.mark.slow
def test_the_commands_and_the_configuration_of_the_page_start_a_shuffler(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of `shufl`
    environment, place = {**os.environ, "PATH": path}, tmp_path / "empty"
    place.mkdir()
    *commands, last = re.findall(r"^\$ (.*)", printed("console"), re.M)
    assert last == START
    for command in commands:
        subprocess.run(command, shell=True, cwd=place, env=environment, check=True)
    listen, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = printed("toml")
    assert '"0.0.0.0:9000"' in config and '"127.0.0.1:9464"' in config
    config = config.replace("0.0.0.0:9000", listen).replace("127.0.0.1:9464", metrics)
    (place / "shuffler.toml").write_text(config, encoding="utf-8")
    child = subprocess.Popen(
        ["sh", "-c", f"exec {START}"],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = child.stdout.readline()
        assert line == f"shuffler listening on {listen}\n", child.stderr.read()
        assert "shuffler listening on 0.0.0.0:9000\n" in printed("console")
        with ControlClient(listen, Credentials.read(place / "server", "server")) as control:
            # Its floor is below the page's.
            assert refusal(control.create_run, "run", plan(9, 3), 100) is Refusal.BELOW_FLOOR
        assert scrape(metrics)['shufl_refusals_total{reason="BELOW_FLOOR"}'] == 1
        with ControlClient(listen, Credentials.read(place / "phone", "phone-7")) as phone:
            assert refusal(phone.end_run, "run") is Refusal.NOT_PERMITTED
        child.terminate()
        assert child.communicate(timeout=LIMIT) == ("", "")
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


def test_every_key_of_a_shuffler_s_configuration_is_on_the_page():
    """But for those that the page has in its text."""
    content = tomllib.loads(printed("toml"))
    ShufflerConfig.model_validate(content)
    for name, field in ShufflerConfig.model_fields.items():
        if name == "simulation_seed":
            continue
        assert name in content
        if isinstance(content[name], dict):
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            (section,) = (kind for kind in kinds if hasattr(kind, "model_fields"))
            assert set(content[name]) == set(section.model_fields)
