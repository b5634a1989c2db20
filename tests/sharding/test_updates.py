"""New weights, and sleep, of an engine over several devices; eight devices forced on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.sharding.update_cases import CASES

ROOT = Path(__file__).parents[2]
# Devices that do not divide the experts, and weights that are rounded as they come; --thorough runs every case.
SHORT = ["8 experts, dp3 pp2 ep, rounded to int8"]


def test_tokens_equal_those_of_one_device(executables_dir, thorough):
    names = list(CASES) if thorough else SHORT
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.update_cases", executables_dir, *names]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["case"] for row in rows] == names
    for row in rows:
        assert row["tokens"] == row["alone"], row
        first, second, *later = row["tokens"]
        assert second != first and later == [first, first, second], row
        assert row["same"] and row["names"] == row["own"] and row["compilations"] == 0, row
        assert row["alive"] == [[0], [0, 0], [0, 0]], row
        for before, asleep, after in row["slept"]:
            assert after == before and all(asleep.get(each, 0) < 0.2 * size for each, size in before.items()), row
