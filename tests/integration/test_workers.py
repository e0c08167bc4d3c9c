"""Ray workers of the vectorised engine: real Ray, real kills."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import grpc
import numpy as np
import pytest
import ray
from rich.console import Console

from nights import by_night
from ports import free_ports
from run_world import (
    LIMIT,
    left_behind,
    only_folder,
    ray_of_its_own,
    same_model,
    set_options,
    shufl,
    tiny_config,
    trained,
    wait_until,
)
from shufl.accounting import Ledger
from shufl.learning.config import load
from shufl.learning.parameters import sent
from shufl.protocol.mechanisms import SeededRandomness
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare_simulation
from shufl.results.run import Run
from shufl.simulator.engines import ray_cluster
from shufl.simulator.engines.ray_workers import divide, needs_of_a_worker, ray_workers
from shufl.simulator.engines.report_sum import ReportSum
from warm import Warm

HERE = Path(__file__).parent
VECTORISED = "simulation.engine=vectorised"
SETTINGS = [
    VECTORISED, "model.name=odd_models:kills_its_worker", "simulation.records_per_chunk=4",
    "simulation.workers=2",
]  # fmt: skip


def engine(folder, *overrides):
    """The vectorised engine of the tiny configuration."""
    config = load(str(tiny_config(folder, 4)), [VECTORISED, *overrides])
    _, made = prepare_simulation(config)
    return made


def with_workers(tmp_path, kills, **environment):
    """`shufl run` whose workers are killed so often; what it starts inherits TEST_FOLDER."""
    options = f"model.options={{folder='{tmp_path}', times={kills}}}"
    return shufl(
        "run", tiny_config(tmp_path, 4), "--runs", tmp_path / "runs",
        *set_options(*SETTINGS, options), cwd=HERE,
        env={**os.environ, "TEST_FOLDER": str(tmp_path), **environment},
    )  # fmt: skip


@contextmanager
def cluster(**resources):
    """A Ray, to which this process is connected; its address."""
    with ray_of_its_own(**resources) as address:
        ray.init(address, log_to_driver=False)
        try:
            yield address
        finally:
            ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("whose", "kills"), [("shared", 1), *by_night(("own", 2))])
def test_killed_workers_change_nothing(whose, kills, tmp_path):
    """By night in a Ray that the run starts and ends."""
    with ray_of_its_own(num_cpus=2) if whose == "shared" else nullcontext("") as address:
        result = with_workers(tmp_path, kills, RAY_ADDRESS=address)
    assert (result.returncode, result.stderr) == (0, "")
    wait_until(lambda: not left_behind(tmp_path), 30, "Ray's processes to end")
    assert "vectorised on cpu in float32 by 2 Ray workers" in result.stdout
    assert "A worker died" not in result.stdout
    assert "A worker died" in (only_folder(tmp_path / "runs") / "ray.log").read_text()
    assert (tmp_path / "kills").read_text() == kills * "x"
    folder = only_folder(tmp_path / "runs")
    config = load(str(folder / "config.toml"), ["simulation.workers=1"])  # the kills were before
    alone = trained(config, tmp_path / "alone")
    assert same_model(folder, alone)
    ledgers = [Ledger.read(path / "ledger.jsonl").entries for path in (folder, alone)]
    assert ledgers[0] == ledgers[1] and len(ledgers[0]) == 4


@pytest.mark.nightly
def test_workers_that_always_die_end_the_run_in_one_line_and_the_cluster_stays(tmp_path):
    """On a cluster that is there before the run."""
    with cluster(num_cpus=2) as address:
        result = with_workers(tmp_path, 1000, RAY_ADDRESS=address)
        assert ray.cluster_resources()["CPU"] == 2
    assert result.returncode == 1
    assert result.stderr == "error: round 1: a Ray worker died 3 times\n"
    assert "ended early: 1 rounds spent" in result.stdout


@pytest.mark.parametrize("noise", ["report", "aggregate"])
@pytest.mark.parametrize("ends", [[32, 60], [16, 48, 60], [0, 60, 60]])
def test_shards_sum_to_the_same_bits_as_the_whole(tmp_path, noise, ends):
    """Shards of whole blocks: four of sixteen ids here; and blankets of two shufflers."""
    of = engine(
        tmp_path, f"simulation.noise={noise}", "simulation.records_per_chunk=8",
        "training.algorithm=fedavg",
    )  # fmt: skip
    model, records = of.settings.make_model(), of.load_users()
    users = np.flatnonzero(SeededRandomness(5).check_ins(1, np.arange(60), 0.5))
    blankets = [(0, 0, 41), (1, 0, 7)]
    whole = ReportSum(of.settings, records).sum(1, sent(model), users, blankets)
    total = np.zeros_like(whole)
    shards = list(zip([0, *ends], ends, strict=False))
    for shard, part in zip(shards, divide(users, blankets, shards), strict=True):
        total += ReportSum(of.settings, records.of(*shard)).sum(1, sent(model), *part)
    assert np.array_equal(total, whole) and np.abs(whole).max() > 500


@pytest.mark.nightly
def test_workers_share_the_gpus_of_a_cluster():
    """Two, by Ray's count, which it can be told."""
    with cluster(num_cpus=13, num_gpus=2):
        for number in (1, 2, 3, 11, 12, 13):
            share = needs_of_a_worker("cuda", number)["num_gpus"]
            together = ray.util.placement_group([{"GPU": share}] * number)
            assert together.wait(LIMIT), f"{number} workers with {share} GPUs each"
            ray.util.remove_placement_group(together)


@pytest.mark.nightly
def test_a_cluster_without_gpus_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # Ray finds none, wherever this runs
    of = engine(tmp_path)
    keys = of.settings.keys.model_copy(update={"device": "cuda", "workers": 2})
    settings, stop = dataclasses.replace(of.settings, keys=keys), threading.Event()
    message = '^simulation.device must be "cpu" in this Ray, which has no GPU, got "cuda"$'
    with (
        pytest.raises(ConfigError, match=message),
        ray_workers(settings, of.load_users(), tmp_path / "ray.log", stop),
    ):
        raise AssertionError("workers have started")


@pytest.mark.nightly
def test_what_no_node_of_a_cluster_has_is_one_line_and_nothing_is_waited_for(tmp_path):
    """Two nodes of one CPU each. Without the check these commands would wait for ever."""
    config, runs = tiny_config(tmp_path, 4), tmp_path / "runs"
    run = "run", config, "--runs", runs, "--set"
    with ray_of_its_own(nodes=2, num_cpus=1) as address:
        env = os.environ | {"RAY_ADDRESS": address}
        for said, command in (
            ("--cpus must be at most 1, ", ("experiment", "digits", "--cpus", 2)),
            ("simulation.cpus_per_node must be at most 1, ", (*run, "simulation.cpus_per_node=2")),
            (
                "simulation.workers must be at most 2, ",
                (*run, "simulation.workers=3", "--engine", "vectorised"),
            ),
        ):
            result = shufl(*command, env=env, cwd=tmp_path)
            assert result.returncode == 2
            assert result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1
    assert not runs.exists()


_AUTOSCALED = {
    "cluster_name": "own", "max_workers": 2, "upscaling_speed": 1.0, "idle_timeout_minutes": 9,
    "provider": {"type": "fake_multinode", "head_node_id": "f" * 51 + "00000"},
    "head_node_type": "head", "file_mounts_sync_continuously": False,
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{
        f"{name}_commands": []
        for name in (
            "initialization", "setup", "head_setup", "worker_setup", "head_start_ray",
            "worker_start_ray",
        )
    },
    "available_node_types": {
        "head": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "more": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 2},
    },
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("newer", [0, 1])
def test_a_cluster_with_an_autoscaler_may_get_more_nodes(tmp_path, memory_path, monkeypatch, newer):
    (tmp_path / "config.yaml").write_text(json.dumps(_AUTOSCALED))
    ports = iter(free_ports(4))
    address = f"127.0.0.1:{next(ports)}"
    options = {
        "autoscaling-config": tmp_path / "config.yaml", "num-cpus": 1, "include-dashboard": False,
        "node-ip-address": "127.0.0.1", "port": address.rpartition(":")[2],
        "ray-client-server-port": next(ports), "metrics-export-port": next(ports),
        "dashboard-agent-listen-port": next(ports), "min-worker-port": 0, "max-worker-port": 0,
    }  # fmt: skip
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block"]
    command += [f"--{name}={value}" for name, value in options.items()]
    env = os.environ | {"RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": str(newer)}
    env["RAY_TMPDIR"] = str(memory_path)  # where no other test looks for a cluster
    monkeypatch.setenv("RAY_ADDRESS", address)
    with (tmp_path / "said").open("wb") as said:
        head = subprocess.Popen(command, stdout=said, stderr=said, env=env)
    try:

        def known():
            assert head.poll() is None, (tmp_path / "said").read_text()
            try:
                return ray_cluster.nodes_of_ray() == [ray_cluster._ANY_NODE]
            except ConfigError:  # it does not answer yet
                return False

        wait_until(known, LIMIT, "the autoscaler to say that it is there")
        ray_cluster.check_cpus("--cpus", 4)
    finally:
        head.terminate()
        head.wait()


@pytest.mark.nightly
def test_sigterm_ends_a_wait_for_cpus_that_others_have(tmp_path):
    settings = "--set", "simulation.workers=2", "--engine", "vectorised"
    command = "run", tiny_config(tmp_path, 4), "--runs", tmp_path / "runs", *settings
    with cluster(num_cpus=2) as address:
        taken = ray.util.placement_group([{"CPU": 1}])
        assert taken.wait(LIMIT)
        run = Warm(command, env=os.environ | {"RAY_ADDRESS": address})
        try:
            wait_until(lambda: len(ray._private.state.jobs()) == 3, LIMIT, "the run to connect")
            wait_until(lambda: len(ray._private.state.actors()) == 2, LIMIT, "its workers")
            run.terminate()
            out, err = run.communicate(LIMIT)
        finally:
            run.kill()
    assert (run.returncode, err) == (130, "")
    assert "interrupted" in out and "Fewer rounds are spent" in out


@pytest.fixture(scope="module")
def no_cluster():
    """Addresses where Ray is not: nobody listens, nobody answers, somebody else does.

    Ray takes 127.0.0.1 for the machine's other address.
    """
    with socket.create_server(("127.0.0.2", 0)) as gone:
        closed = f"127.0.0.2:{gone.getsockname()[1]}"
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.2:0")
    other.start()
    with socket.create_server(("127.0.0.2", 0)) as mute:
        silent = f"127.0.0.2:{mute.getsockname()[1]}"
        yield {"closed": closed, "silent": silent, "other": f"127.0.0.2:{port}"}
    other.stop(None)


@pytest.mark.parametrize("engine", ["flower", "vectorised"])
@pytest.mark.parametrize(
    "address",
    ["{closed}", "{silent}", "{other}", "ray://{closed}", "ray://{silent}", "cluster", "a:b", ":1"],
)
def test_a_ray_address_without_a_cluster_is_one_line_before_any_work(
    tmp_path, monkeypatch, no_cluster, engine, address
):
    given = address.format(**no_cluster)
    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setattr(ray_cluster, "_CONNECT_SECONDS", 0.5)
    settings = [f"simulation.engine={engine}", "simulation.workers=2"]
    config = load(str(tiny_config(tmp_path, 4)), settings)
    message = f"^RAY_ADDRESS must name a running cluster, got {given}: .+$"
    with pytest.raises(ConfigError, match=message) as raised:
        Run.new(config, tmp_path / "none", Console(quiet=True)).train()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200
    assert not (tmp_path / "none").exists()
