"""Loading into meshes of several devices and processes, in processes of their own (load_worker.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sharding.load_worker import LARGE, random_tensors, write_checkpoint

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400  # of a machine that does other work; it takes ten
COUNTED_LATE = 4 << 20  # bytes: every processor's share of a count of pages is added to it once it is large


def start(*args: object, num_devices: int) -> subprocess.Popen[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tests" / "sharding" / "load_worker.py", *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What they printed. Where one fails, the others, which would wait for it, are ended."""
    deadline = time.monotonic() + PATIENCE_S
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(codes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    ended = [process.communicate() for process in processes]
    assert codes == [0] * len(processes), "\n".join(errors[-4000:] for _, errors in ended)
    return [output for output, _ in ended]


def test_every_part_of_every_weight_on_meshes_of_eight_devices(tmp_path, thorough):
    (output,) = finish([start("meshes", tmp_path, *["--thorough"] * thorough, num_devices=8)])
    assert "meshes ok" in output


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read as Linux tells it")
def test_two_processes_read_the_files_once_and_hold_their_parts_only(tmp_path):
    write_checkpoint(tmp_path, random_tensors(LARGE))
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = finish([start("process", tmp_path, number, port, num_devices=2) for number in range(2)])
    numbers = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert files <= sum(each["read"] for each in numbers) <= 1.05 * files, numbers
    for each in numbers:
        assert each["own"] < 0.51 * files, numbers
        assert each["grown"] <= each["own"] + each["largest"] + COUNTED_LATE, numbers
