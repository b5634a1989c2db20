"""Programs of several devices bring order into what these exchange: see exchange_order.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tests.sharding.exchange_order import CASES, SHORT, unordered

ROOT = Path(__file__).parents[2]


def beside(x):
    return lax.cond(x[0] > 0, lambda: lax.psum(x, "i"), lambda: x), lax.psum(x, "i")


def loop_beside(x):
    return lax.fori_loop(0, 3, lambda _, y: lax.psum(y, "i"), x), jax.jit(lambda: lax.all_gather(x, "i"))()


def barrier_between(x):
    first, then = lax.optimization_barrier((lax.cond(x[0] > 0, lambda: lax.psum(x, "i"), lambda: x), x))
    return first, lax.psum(then, "i")


def inside_of_one(x):
    return lax.scan(lambda y, _: (sum(beside(y)), None), x, length=2)[0]


def behind(x):
    first = lax.cond(x[0] > 0, lambda: lax.psum(x, "i"), lambda: x)
    return lax.psum(first, "i")


def without_any(x):
    return lax.cond(x[0] > 0, lambda: x + 1, lambda: x), lax.psum(x, "i"), lax.pmax(x, "i")


@pytest.mark.parametrize(
    ("function", "count"),
    [(beside, 1), (loop_beside, 1), (barrier_between, 1), (inside_of_one, 1), (behind, 0), (without_any, 0)],
)
def test_what_has_no_order_is_found(function, count):
    spec = PartitionSpec()
    mesh = Mesh(jax.devices()[:1], ("i",))
    split = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert len(set(unordered(jax.make_jaxpr(split)(jnp.zeros(4)).jaxpr))) == count


def test_everything_exchanged_has_an_order(thorough):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.exchange_order", *["--thorough"] * thorough]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= len(CASES if thorough else SHORT)
    for row in rows:
        assert row["found"] and not any(row["found"].values()), row
