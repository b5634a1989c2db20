"""Towers over four devices: those that share their weights give what one device does, and so do those that have all of
them and pictures of their own, without an exchange.

Run as a module it compares, with four forced CPU devices: python -m tests.sharding.test_towers CASE ...
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Norms over all heads, and scales; a projection that keeps its weight whole; heads that turn.
CASES = ("internvl_rms_vision", "gemma3_sees_vision", "llama4_sees_vision")


def compare(name: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import PartitionSpec

    from jaxengine.models.build import Build
    from jaxengine.models.config.readers.hf import read_config_json
    from jaxengine.models.registry import build_model, read_hf
    from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
    from jaxengine.models.weights.load import load_params
    from jaxengine.sharding.layout import MESH_AXES, MeshLayout
    from jaxengine.sharding.mesh import make_mesh
    from tests.fixtures.drawn_weights import checkpoint

    folder = checkpoint(name)
    config = read_hf(read_config_json(folder))

    def tower(layout, mesh, split):
        model = build_model(config, Build("float32", mesh=layout, whole_parts=() if split else ("tower",)))
        source = SafetensorsCheckpoint(folder)
        nnx.update(model, load_params(model, source, mesh=mesh))
        source.close()
        return nnx.split(model.tower)

    sizes = config.tower
    assert sizes is not None
    values = np.random.default_rng(0).standard_normal((4 * sizes.unit, sizes.num_features))
    patches, columns = jnp.asarray(values, jnp.float32), jnp.zeros((0, 4 * sizes.unit), jnp.int32)
    graph, state = tower(MeshLayout(), None, True)
    alone = nnx.merge(graph, state)(patches, columns)
    for layout in (MeshLayout(attn=2, model=2), MeshLayout(data=2, model=2)):
        mesh = make_mesh(layout, jax.devices()[:4])
        for split in (True, False):
            graph, state = tower(layout, mesh, split)
            specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
            rows = PartitionSpec() if split else PartitionSpec(MESH_AXES)
            by_column = PartitionSpec(None, *rows)
            with jax.set_mesh(mesh):
                shared = jax.shard_map(
                    lambda state, *inputs, graph=graph: nnx.merge(graph, state)(*inputs),
                    in_specs=(specs, rows, by_column),
                    out_specs=rows,
                    check_vma=False,
                )
                compiled = jax.jit(shared).lower(state, patches, columns).compile()
                found = compiled(state, patches, columns)
            np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5 * float(jnp.abs(alone).max()))
            exchanges = any(word in compiled.as_text() for word in ("all-reduce", "all-gather", "reduce-scatter"))
            assert exchanges == split, f"{layout} {split}"
            parts = {leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(state)}
            assert (True in parts) == split, f"{layout} {split}"


@pytest.mark.thorough("compiles fifteen programs for four devices")
def test_devices_share_weights_or_have_pictures_of_their_own():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.test_towers", *CASES]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == "".join(f"{name} equal\n" for name in CASES), done.stderr[-3000:]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        compare(each)
        print(f"{each} equal")
