"""Rows sent to the experts' devices and back, against numpy; eight devices forced on the CPU.

Run as a module it checks and says so: python -m tests.sharding.test_exchange_rows
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxengine.models.build import Build
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts.moe import ExpertLoad, MixtureOfExperts
from jaxengine.sharding.collectives import exchange_rows, join_tokens, share_tokens
from jaxengine.sharding.layout import RAGGED, RULES, MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.rules import logical_to_spec
from tests.models.layers.test_moe import CONFIG, make_layer, oracle, tokens

ROOT = Path(__file__).parents[2]
DEVICES, GROUPS, WIDTH = 8, 16, 3
OWN = GROUPS // DEVICES
MOST = 24  # rows of a sender
EMPTY = -1.0  # where no row lands
ALL = PartitionSpec(RULES["experts"])


def sizes_of() -> dict[str, np.ndarray]:
    """i32[DEVICES, GROUPS] of each case."""
    rng = np.random.default_rng(0)
    some = rng.integers(0, MOST // GROUPS + 1, (DEVICES, GROUPS)).astype(np.int32)
    silent, one, last = some.copy(), np.zeros_like(some), np.zeros_like(some)
    silent[[0, 3, 7]] = 0
    one[:, 5] = MOST
    last[2, [0, GROUPS - 1]] = MOST // 2
    return {
        "some": some,
        "three devices send nothing": silent,
        "all rows to one group": one,
        "one device sends, to the first and the last": last,
        "nobody sends": np.zeros_like(some),
    }


def by_hand(x: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Rows [DEVICES, MOST, WIDTH] as the devices get them, [DEVICES, DEVICES * MOST, WIDTH]."""
    got = np.full((DEVICES, DEVICES * MOST, WIDTH), EMPTY, x.dtype)
    begin = np.cumsum(sizes, axis=1) - sizes
    for device in range(DEVICES):
        rows = [
            x[sender, begin[sender, group] : begin[sender, group] + sizes[sender, group]]
            for group in range(device * OWN, (device + 1) * OWN)
            for sender in range(DEVICES)
        ]
        rows = np.concatenate(rows)
        got[device, : len(rows)] = rows
    return got


class AsOnTPU:
    """jax.lax, but the TPU's branch is taken, and ragged_all_to_all is what its documentation says."""

    def __getattr__(self, name: str):
        return getattr(lax, name)

    @staticmethod
    def platform_dependent(*arguments, cpu, tpu):
        return tpu(*arguments)

    @staticmethod
    def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        tables = (input_offsets, send_sizes, output_offsets)
        begin, sizes, then = (lax.all_to_all(table, axis_name, 0, 0, tiled=True) for table in tables)
        rows, place = lax.all_gather(operand, axis_name), jnp.arange(output.shape[0])
        for i in range(sizes.size):
            lands = (place >= then[i]) & (place < then[i] + recv_sizes[i])
            sender = i * DEVICES // sizes.size
            output = jnp.where(lands[:, None], rows[sender][begin[i] + place - then[i]], output)
        return jnp.where(jnp.all(sizes == recv_sizes), output, jnp.nan)


def check_rows() -> None:
    """Every row lands where it should, and comes back to where it was; nothing else is touched."""
    x = np.arange(DEVICES * MOST * WIDTH, dtype=np.float32).reshape(DEVICES, MOST, WIDTH)

    def both(x, sizes):
        rows = exchange_rows(x, jnp.full((DEVICES * MOST, WIDTH), EMPTY), sizes, "experts")
        return rows, exchange_rows(2 * rows, jnp.full((MOST, WIDTH), EMPTY), sizes, "experts", back=True)

    for layout in (MeshLayout(data=2, attn=2, model=2), MeshLayout(data=8), MeshLayout(attn=2, model=4)):
        mapped = jax.jit(
            jax.shard_map(
                both, mesh=make_mesh(layout), in_specs=(ALL, PartitionSpec()), out_specs=(ALL, ALL), check_vma=False
            )
        )
        for name, sizes in sizes_of().items():
            rows, returned = mapped(x.reshape(-1, WIDTH), sizes)
            np.testing.assert_array_equal(np.asarray(rows).reshape(DEVICES, -1, WIDTH), by_hand(x, sizes), name)
            sent = np.arange(MOST) < sizes.sum(axis=1)[:, None]
            wanted = np.where(sent[..., None], 2 * x, EMPTY)
            np.testing.assert_array_equal(np.asarray(returned).reshape(x.shape), wanted, name)


def check_shares() -> None:
    """Devices with the same tokens split them, whether their number divides or not."""
    layout = MeshLayout(data=2, model=4)
    for count in (1, 4, 5, 8):
        x = np.arange(2 * count * 2, dtype=np.float32).reshape(2 * count, 2)
        share = -(-count // 4)

        def split(x, count=count):
            own = share_tokens(x, "experts", fill=-1)
            return own, join_tokens(own, "experts", count)

        batch = PartitionSpec("data")
        run = jax.shard_map(split, mesh=make_mesh(layout), in_specs=batch, out_specs=(ALL, batch), check_vma=False)
        own, joined = jax.jit(run)(x)
        np.testing.assert_array_equal(joined, x)
        padded = np.full((2, 4 * share, 2), -1, np.float32)
        padded[:, :count] = x.reshape(2, count, 2)
        np.testing.assert_array_equal(np.asarray(own), padded.reshape(-1, 2))


def check_layer() -> None:
    """The layer gives what one device gives, also where devices cannot share tokens evenly; padding goes nowhere."""
    plain, x = make_layer(), tokens(20)
    is_token = np.arange(20) % 5 > 0
    expected, expected_load = oracle(plain, x[is_token])
    for sizes in ({"model": 8}, {"data": 4}, {"data": 2, "model": 4}, {"data": 2, "attn": 2, "model": 2}):
        layout = MeshLayout(**sizes, expert_parallel=True, all2all_backend=RAGGED)
        layer = MixtureOfExperts(CONFIG, source="m", build=Build(jnp.float32, layout))
        assert layer.sends_rows
        for name in ("router", "gate_up", "down"):
            getattr(layer, name).values.set_value(getattr(plain, name).values[...])
        graph, state = nnx.split(layer)
        specs = jax.tree.map(
            lambda param: param.replace(logical_to_spec(param.get_metadata()["decl"].axes)),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Param),
        )

        def run(state, x, is_token, graph=graph):
            layer = nnx.merge(graph, state)
            with mock.patch("jaxengine.models.layers.experts.moe.exchange_rows", wraps=exchange_rows) as spied:
                y = layer(x, Rows(is_token))
            return y, nnx.pop(layer, ExpertLoad)["load"][...][None], jnp.sum(spied.call_args.args[2])

        batch = PartitionSpec(RULES["batch"])
        results = (batch, batch, PartitionSpec())
        mapped = jax.shard_map(
            run, mesh=make_mesh(layout), in_specs=(specs, batch, batch), out_specs=results, check_vma=False
        )
        got, load, sent = map(np.asarray, jax.jit(mapped)(state, x, jnp.asarray(is_token)))
        assert sent == is_token.sum() * layer.experts.num_per_token, (sizes, sent)
        assert not got[~is_token].any(), sizes
        np.testing.assert_allclose(got[is_token], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=sizes)
        np.testing.assert_array_equal(load.sum(axis=0), expected_load, err_msg=sizes)


def test_rows_reach_their_experts():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.test_exchange_rows"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["rows", "shares", "layer", "tpu"]


if __name__ == "__main__":
    assert jax.device_count() == DEVICES
    checks = {"rows": check_rows, "shares": check_shares, "layer": check_layer}
    for name, check in checks.items():
        check()
        print(name)
    with mock.patch("jaxengine.sharding.collectives.lax", AsOnTPU()):
        jax.clear_caches()
        check_rows()
        print("tpu")
