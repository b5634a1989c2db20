"""Captured activations equal transformers': in a crowd, under preemption, on one device and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.layers.test_taps import RECORDED, TOLERANCE

ROOT = Path(__file__).parents[2]
COUNTS = (1, 2)


@pytest.mark.thorough("two engines of each recorded family")
def test_captured_in_a_crowd_is_what_transformers_computes(executables_dir):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.capture_crowds", executables_dir, *RECORDED]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["family"], row["devices"]) for row in rows] == [(name, count) for name in RECORDED for count in COUNTS]
    for row in rows:
        assert row["preempted"] and row["shaped"] and not row["compilations"], row
        assert row["error"] <= TOLERANCE, row
