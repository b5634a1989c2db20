"""One engine over two processes of CPU devices (gloo): the same tokens; an end with a reason, not a hang."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.runner.start.devices import choose_devices

ROOT = Path(__file__).parents[2]
RANKS_AND_HEADS = ("dense", {"tensor_parallel_size": 2, "data_parallel_size": 2})
FEWEST = ("dense", {"tensor_parallel_size": 2, "hf_overrides": {"num_hidden_layers": 1}})
# Compiling is what takes the time, so these only with --thorough: heads over both processes, and all kinds at once,
# ranks and experts over both, stages whose hidden states stay in one.
STAGES = {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2}
OTHERS = [("dense", {"tensor_parallel_size": 8}), ("moe", STAGES | {"enable_expert_parallel": True})]


class Pair:
    """Host 0 and workers as child processes, their output in files, ended with the test.

    num_devices: CPU devices of each process.
    """

    num_devices = 4

    def __init__(self, folder: Path, executables_dir: str):
        self.folder, self.executables_dir = folder, executables_dir
        self.port = free_port()
        self.key = write_key(folder / "key")
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self.num_devices}"
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            command = [sys.executable, "-m", *map(str, arguments)]
            self.children[name] = subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=err)
        return self.children[name]

    def start_host(
        self, mode: str, model: str, options: dict[str, Any], *, timeout: int = 60
    ) -> subprocess.Popen[bytes]:
        cluster = {"nnodes": 2, "master_port": self.port, "cluster_key_file": str(self.key), "cluster_timeout": timeout}
        chosen = json.dumps(cluster | options)
        module = "tests.sharding.cluster_host"
        return self.start("host", module, mode, self.folder / "models", self.executables_dir, model, chosen)

    def start_worker(self, name: str = "worker", key: Path | None = None, rank: int = 1) -> subprocess.Popen[bytes]:
        cluster = ["--nnodes", 2, "--master-port", self.port, "--cluster-timeout", 60]
        return self.start(
            name, "jaxengine", "worker", "--node-rank", rank, *cluster, "--cluster-key-file", key or self.key
        )

    def told(self, name: str = "host") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(name, "out").splitlines() if line.startswith("{")]

    def text(self, name: str, kind: str = "err") -> str:
        return (self.folder / f"{name}.{kind}").read_text(errors="replace")

    def wait(self, name: str, seconds: float) -> int:
        """The exit status; fails if it takes longer."""
        try:
            return self.children[name].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} did not end within {seconds} s: {self.text(name)[-2000:]}")

    def wait_until_serving(self) -> None:
        deadline = time.monotonic() + 150
        while not self.told():
            ended = [name for name in ("host", "worker") if self.children[name].poll() is not None]
            assert not ended and time.monotonic() < deadline, self.text("host")[-2000:] + self.text("worker")[-2000:]
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def write_key(path: Path) -> Path:
    path.write_bytes(os.urandom(32).hex().encode())
    path.chmod(0o600)
    return path


@pytest.fixture
def pair(tmp_path, executables_dir):
    made = Pair(tmp_path, executables_dir)
    yield made
    for child in made.children.values():
        child.kill()
        child.wait()


def pytest_generate_tests(metafunc):
    if "engine" in metafunc.fixturenames:
        engines = [RANKS_AND_HEADS, *OTHERS] if metafunc.config.getoption("--thorough") else [RANKS_AND_HEADS]
        metafunc.parametrize("engine", engines, ids=lambda engine: engine[0])


def test_two_processes_give_the_tokens_of_one_device(pair, engine, report):
    pair.num_devices = 2 if engine is RANKS_AND_HEADS else 4
    pair.start_host("compare", *engine, timeout=540)
    pair.start_worker()
    assert pair.wait("host", 560) == 0, pair.text("host")[-4000:]
    (result,) = pair.told()
    assert result["wrong"] == [] and result["compilations"] == 0
    assert result["preemptions"] > 0 and result["prefix_hits"] > 0
    assert pair.wait("worker", 60) == 0, pair.text("worker")
    report(f"two processes, {engine}: as one device, {result['preemptions']} preemptions")


def test_host_0_says_which_worker_is_lost(pair):
    pair.num_devices = 1
    pair.start_host("serve", *FEWEST)
    pair.start_worker()
    pair.wait_until_serving()
    pair.children["worker"].kill()
    assert pair.wait("host", 60) == 1
    failed = pair.told()[-1]["failed"]
    assert failed.startswith(f"node rank 1 ({socket.gethostname()}, 127.0.0.1) is lost: ")


def test_a_worker_with_another_key_stays_out_and_one_that_is_in_ends_with_host_0(pair, tmp_path):
    pair.num_devices = 1
    pair.start_host("serve", *FEWEST)
    pair.start_worker("stranger", key=write_key(tmp_path / "other"))
    assert pair.wait("stranger", 60) == 2
    assert pair.text("stranger") == "jaxengine: error: host 0 has another cluster key\n"
    pair.start_worker()
    pair.wait_until_serving()
    assert "a connection from 127.0.0.1 was refused: it has another cluster key" in pair.text("host")
    pair.children["host"].kill()
    assert pair.wait("worker", 60) == 1
    assert f"node rank 1 ends: host 0 at 127.0.0.1:{pair.port} is lost: " in pair.text("worker")


def test_a_start_up_names_the_workers_that_are_missing(pair):
    pair.start_host("serve", *RANKS_AND_HEADS, timeout=3)
    assert pair.wait("host", 60) == 0
    (told,) = pair.told()
    assert told["failed"] == "node rank 1 did not join within 3 s" and 3 <= told["seconds"] < 10


@dataclass(frozen=True)
class Device:
    """Where it is, which is all that choosing devices looks at."""

    process_index: int
    number: int


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"tensor_parallel_size": 4}, [0, 1, 0, 1]),
        ({"data_parallel_size": 8}, [0, 1, 2, 3, 0, 1, 2, 3]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_every_stage_has_as_many_devices_of_each_process(options, numbers):
    devices = [Device(process, number) for process in range(2) for number in range(4)]
    chosen = choose_devices(EngineConfig(nnodes=2, **options), devices, None)[1]
    assert [device.number for device in chosen] == numbers
    size = len(chosen) // options.get("pipeline_parallel_size", 1)
    for first in range(0, len(chosen), size):
        places = [device.process_index for device in chosen[first : first + size]]
        assert places == [0] * (size // 2) + [1] * (size // 2)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 3},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 3, "data_parallel_size": 2, "pipeline_parallel_size": 1, "nnodes": 4},
    ],
)
def test_sizes_that_leave_a_process_out_are_refused(options):
    devices = [Device(process, number) for process in range(options.get("nnodes", 2)) for number in range(4)]
    with pytest.raises(ConfigError, match="a multiple of nnodes"):
        choose_devices(EngineConfig(**{"nnodes": 2} | options), devices, None)
