"""A tower over two devices that share its weights, and over one: prints the largest difference, of the largest number.

    python -m tests.models.vision.split_tower FOLDER

needs two devices (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxengine.models.build import Build
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.rules import logical_to_spec


def tower(folder: Path, layout: MeshLayout | None) -> nnx.Module:
    mesh = None if layout is None else make_mesh(layout)
    model = build_model(read_folder(folder), Build("float32", layout or MeshLayout()))
    source = SafetensorsCheckpoint(folder)
    nnx.update(model, load_params(model, source, mesh=mesh))
    source.close()
    return model.tower


def main() -> None:
    folder, layout = Path(sys.argv[1]), MeshLayout(model=2)
    config = read_folder(folder).tower
    assert config is not None
    rng = np.random.RandomState(0)
    patches = rng.standard_normal((config.unit, config.num_features)).astype(np.float32)
    columns = np.zeros((len(config.columns), config.unit), np.int32)
    columns[:] = np.arange(config.unit) % 7
    columns[0] = np.arange(config.unit) // 100
    whole = jax.jit(tower(folder, None))(patches, columns)
    graph, state = nnx.split(tower(folder, layout))
    specs = jax.tree.map(
        lambda param: param.replace(logical_to_spec(param.get_metadata()["decl"].axes)),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Param),
    )
    replicated = PartitionSpec()
    program = jax.shard_map(
        lambda state, *inputs: nnx.merge(graph, state)(*inputs),
        mesh=make_mesh(layout),
        in_specs=(specs, replicated, replicated),
        out_specs=replicated,
        check_vma=False,
    )
    parts = jax.jit(program)(state, patches, columns)
    print(float(np.abs(np.asarray(whole) - np.asarray(parts)).max() / np.abs(np.asarray(whole)).max()))


if __name__ == "__main__":
    main()
