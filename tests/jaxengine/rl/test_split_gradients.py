"""Gradients of jaxengine.rl.forward where two devices share the weights, against those that transformers recorded.

Run as a module it compares, with two forced CPU devices: python -m tests.jaxengine.rl.test_split_gradients NAME ...
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Logical axes that the devices share, as in Megatron-LM: heads, the inner size of MLPs, experts, the vocabulary.
SPLIT = {"heads", "kv_heads", "ffn", "vocab", "experts"}


def split_over(model: Any, mesh: Any) -> Any:
    """A model's weights, each split along the first of its axes of SPLIT whose size allows it."""
    import jax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxengine.models.params.declare import declared_params

    axes_of = {param.path: param.decl.axes for param in declared_params(model)}

    def place(path: Any, values: jax.Array) -> jax.Array:
        split = [
            axis in SPLIT and size % mesh.size == 0 for axis, size in zip(axes_of[path], values.shape, strict=True)
        ]
        spec = ("tp" if one and index == split.index(True) else None for index, one in enumerate(split))
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    state = nnx.to_flat_state(nnx.state(model))
    return nnx.from_flat_state([(path, leaf.replace(place(path, leaf[...]))) for path, leaf in state])


def compare(name: str) -> None:
    import jax

    from jaxengine.rl import forward
    from tests.jaxengine.rl import test_forward as whole
    from tests.models.conftest import load_recorded

    case, automatic = load_recorded(name), jax.sharding.AxisType.Auto
    rows, mesh = whole.packed(case), jax.make_mesh((2,), ("tp",), (automatic,))
    params = split_over(case.model, mesh)
    num_split = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    assert num_split > 5, num_split
    loss = partial(whole.loss_of_last, case=case, rows=rows)
    _, grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    with tempfile.TemporaryDirectory() as folder:
        known = whole.recorded_gradients(name, case.model, Path(folder))
    whole.assert_gradients(grads, *known)
    with pytest.raises(ValueError, match="params must be on one device with exact=True, got 2 devices"):
        forward(case.model, params, rows.tokens, exact=True)


# Dense with windows; then experts, latent attention, states.
FURTHER = pytest.mark.thorough("further kinds of layers")
NAMES = [
    pytest.param(["gemma2"]),
    pytest.param(
        ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2", "zaya", "inkling", "dory"],
        marks=FURTHER,
    ),
]


@pytest.mark.parametrize("names", NAMES, ids="+".join)
def test_gradients_are_those_of_transformers(names):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "tests.jaxengine.rl.test_split_gradients", *names]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        compare(each)
