"""Every kind of parallelism gives the tokens that one device gives; eight devices forced on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.sharding.parallel_cases import CASES

ROOT = Path(__file__).parents[2]
# Every kind of parallelism at once; --thorough runs every case.
SHORT = ("drafts latent tp2 dp2 pp2 ep, replicated",)
WITH_STATES = ("states", "convolutions", "mamba2", "gates_apart")


def run_cases(names: list[str], folder: Path, cache: str) -> list[dict]:
    """The rows of `parallel_cases` for cases of one model, which share its run on one device."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.parallel_cases", str(folder), cache, *names]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_tokens_equal_those_of_one_device(tmp_path, executables_dir, report, thorough):
    by_model: dict[str, list[str]] = {}
    for name in CASES if thorough else SHORT:
        by_model.setdefault(CASES[name][0], []).append(name)
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda names: run_cases(names, tmp_path, executables_dir), by_model.values())
        rows = [row for part in parts for row in part]
    assert sorted(row["case"] for row in rows) == sorted(CASES if thorough else SHORT)
    for row in rows:
        assert not row["wrong"], (row["case"], row["wrong"])
        assert row["compilations"] == 0, row
        assert row["accepted"] is None or row["accepted"] > 0, row
        if row["case"].startswith("draft model"):  # which is the model itself
            assert row["accepted"] >= 0.99 * row["drafts"] > 30, row
        # Whether a state was kept where a common prefix ends, chunks decide.
        assert row["prefix_hits"] > 0 or CASES[row["case"]][0] in WITH_STATES, row
        report(f"{row['case']}: as one device, {row['preemptions']} preemptions, {row['prefix_hits']} prefix hits")
    assert sum(row["preemptions"] > 0 for row in rows) > len(rows) / 2
