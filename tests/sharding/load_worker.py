"""Run by test_sharded_load in processes of their own: loading into meshes of several devices, checked part by part.

load_worker.py meshes FOLDER [--thorough]        eight devices, every mesh and kind of weight
load_worker.py process FOLDER NUMBER PORT        one of two processes with two devices each
"""

from __future__ import annotations

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import Rope
from jaxengine.models.params.declare import DeclaredParam, Source, declared_params
from jaxengine.models.registry import build_model
from jaxengine.models.weights import dummy
from jaxengine.models.weights.dummy import dummy_params
from jaxengine.models.weights.formats.orbax import load_checkpoint, load_scales, save_checkpoint
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.kv_scales import KVScales, KVShape
from jaxengine.rl import forward
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.rules import named_sharding
from jaxengine.sharding.stages import Stage
from tests.models.tiny import with_attention

DENSE = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=200,
    hidden_size=32,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    attention=(LayerAttention(num_heads=8, num_kv_heads=4, head_dim=4, rope=Rope(4), bias=True),) * 2,
)
EXPERTS = ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=16)
MIXTURE = with_attention(
    replace(DENSE, architecture="Qwen3MoeForCausalLM", experts=EXPERTS), bias=False, qk_norm=True, num_kv_heads=2
)
JOINED = with_attention(replace(DENSE, architecture="Phi3ForCausalLM"), bias=False)
CASES = {
    "one device": (DENSE, MeshLayout()),
    "2,2,2": (DENSE, MeshLayout(2, 2, 2)),
    "1,2,2": (DENSE, MeshLayout(1, 2, 2)),
    "1,1,4": (DENSE, MeshLayout(1, 1, 4)),
    "kv head copied": (with_attention(DENSE, num_kv_heads=1), MeshLayout(1, 1, 4)),
    "kv heads copied": (with_attention(DENSE, num_kv_heads=2), MeshLayout(1, 1, 4)),
    "three": (with_attention(DENSE, num_heads=6, num_kv_heads=3), MeshLayout(1, 1, 3)),
    "joined": (JOINED, MeshLayout(1, 2, 2)),
    "joined, kv heads copied": (with_attention(JOINED, num_kv_heads=2), MeshLayout(1, 1, 4)),
    "parts of experts": (MIXTURE, MeshLayout(2, 2, 2)),
    "whole experts": (MIXTURE, MeshLayout(2, 2, 2, expert_parallel=True)),
    "six experts on four devices": (
        replace(MIXTURE, experts=replace(EXPERTS, num_experts=6)),
        MeshLayout(2, 2, 1, expert_parallel=True),
    ),
}
# Each takes seconds to compile; the others with --thorough.
DUMMY_CASES = ("joined, kv heads copied", "whole experts")
MORE_DUMMY_CASES = ("2,2,2", "kv heads copied", "parts of experts")
LARGE = with_attention(
    replace(DENSE, vocab_size=16384, hidden_size=256, intermediate_size=1024), head_dim=32, rope=Rope(32)
)


def tensor_names(param: DeclaredParam, source: Source) -> list[str]:
    return [source.name.replace("{expert}", str(expert)) for expert in range(param.decl.num_experts or 1)]


def write_checkpoint(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Two safetensors files and their index."""
    names, weight_map = list(tensors), {}
    for number, listed in enumerate((names[::2], names[1::2])):
        header, end = {}, 0
        for name in listed:
            span = [end, end := end + tensors[name].nbytes]
            header[name] = {"dtype": "F32", "shape": tensors[name].shape, "data_offsets": span}
            weight_map[name] = f"part-{number}.safetensors"
        raw = json.dumps(header).encode()
        data = b"".join(tensors[name].tobytes() for name in listed)
        (folder / f"part-{number}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def random_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(param.source_shape(source), np.float32)
        for param in declared_params(build_model(config, Build(jnp.float32)))
        for source in param.decl.sources
        for name in tensor_names(param, source)
    }


def tensors_of(config: ModelConfig, state) -> dict[str, np.ndarray]:
    """The checkpoint's tensors, taken out of weights that lie on one device."""
    tensors = {}
    for param, leaf in zip(
        declared_params(build_model(config, Build(jnp.float32))), jax.tree.leaves(state), strict=True
    ):
        weight = np.asarray(leaf)
        weight = weight if param.decl.num_experts is not None else weight[None]
        weight = weight.swapaxes(1, 2) if param.decl.transposed else weight
        start = 0
        for source in param.decl.sources:
            rows = slice(source.first, source.first + source.rows)
            for name, part in zip(tensor_names(param, source), weight[:, start : start + source.rows], strict=True):
                tensors.setdefault(name, np.zeros(param.source_shape(source), np.float32))[rows] = part
            start += source.rows
    return tensors


def expected_part(param: DeclaredParam, tensors: dict[str, np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    """The part of a weight at `index`, by the words of ParamDecl."""
    spans = [part.indices(size)[:2] for part, size in zip(index, param.shape, strict=True)]
    decl = param.decl
    first, last = spans[decl.joined_axis]
    parts = param.shape[decl.joined_axis] // (last - first)
    stacked = []
    for expert in range(*spans[0]) if decl.num_experts is not None else [0]:
        shares = []
        for source in decl.sources:
            whole = dict(enumerate(tensors[name] for name in tensor_names(param, source))).get(expert)
            whole = np.zeros(param.source_shape(source), np.float32) if whole is None else whole  # of no expert
            tensor = whole[source.first : source.first + source.rows]
            heads = tensor.reshape(-1, source.group, *tensor.shape[1:])
            contributed = np.repeat(heads, source.repeat, axis=0).reshape(-1, *tensor.shape[1:])
            contributed = np.concatenate([contributed, np.zeros((source.padding, *tensor.shape[1:]), np.float32)])
            shares.append(np.split(contributed, parts)[first // (last - first)])
        joined = np.concatenate(shares)
        stacked.append(joined.T if decl.transposed else joined)
    part = np.stack(stacked) if decl.num_experts is not None else stacked[0]
    made = {decl.joined_axis} | ({0} if decl.num_experts is not None else set())
    return part[tuple(slice(None) if axis in made else slice(*span) for axis, span in enumerate(spans))]


def check_parts(config: ModelConfig, layout: MeshLayout, mesh, state, tensors: dict[str, np.ndarray]) -> int:
    model = build_model(config, Build(jnp.float32, layout))
    num_split = 0
    for param, leaf in zip(declared_params(model), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == named_sharding(mesh, param.decl.axes), param.name
        for shard in leaf.addressable_shards:
            expected = expected_part(param, tensors, shard.index)
            np.testing.assert_array_equal(np.asarray(shard.data), expected, err_msg=param.name)
            num_split += shard.data.shape != param.shape
    return num_split


def load_into_meshes(folder: Path, *, thorough: bool) -> None:
    assert jax.device_count() == 8
    assert "orbax" not in sys.modules, "imported before it is needed"
    tensors = {}
    for number, (case, (config, layout)) in enumerate(CASES.items()):
        tensors = random_tensors(config)
        files = folder / str(number)
        files.mkdir()
        write_checkpoint(files, tensors)
        mesh = make_mesh(layout)
        model = build_model(config, Build(jnp.float32, layout))
        source = SafetensorsCheckpoint(files)
        loaded = load_params(model, source, mesh=mesh)
        source.close()
        split = check_parts(config, layout, mesh, loaded, tensors)
        assert (split > 0) == (layout.size > 1)
        if case in DUMMY_CASES or (thorough and case in MORE_DUMMY_CASES):
            plain = tensors_of(config, dummy_params(build_model(config, Build(jnp.float32)), seed=1))
            for most in (dummy._MOST_BY_NUMPY, 0):  # by NumPy, and each device its own part
                with mock.patch.object(dummy, "_MOST_BY_NUMPY", most):
                    check_parts(config, layout, mesh, dummy_params(model, seed=1, mesh=mesh), plain)
        print(f"{case}: {split} parts of weights", flush=True)
    check_refusals()
    check_converted(folder)
    for config in (DENSE, MIXTURE) if thorough else (MIXTURE,):
        check_trainer(config)
    print("meshes ok")


def refusal(function, *args, **options) -> str:
    try:
        function(*args, **options)
    except ValueError as error:  # ModelFileError is one
        return str(error)
    raise AssertionError("was not refused")


def check_refusals() -> None:
    mesh = make_mesh(MeshLayout(1, 1, 3))
    config = with_attention(replace(DENSE, vocab_size=201), num_heads=6, num_kv_heads=2)
    text = refusal(dummy_params, build_model(config, Build(jnp.float32)), mesh=mesh)
    assert "layers.0.attention.qkv." in text and "made of [24, 8, 8], cannot be split over 3 devices" in text, text
    assert "fewer that work: 1, 2" in text


def check_converted(folder: Path) -> None:
    layout, target = MeshLayout(1, 2, 2), folder / "converted"
    mesh, model = make_mesh(layout), build_model(DENSE, Build(jnp.float32, layout))
    params = dummy_params(model, mesh=mesh)
    tensors = tensors_of(DENSE, dummy_params(build_model(DENSE, Build(jnp.float32))))
    (folder / "config.json").write_text("{}")
    save_checkpoint(target, params, model, mesh=mesh, files=[folder / "config.json"])
    assert (target / "config.json").read_text() == "{}"
    # More replicas of the same parts are no other arrangement.
    for same in (layout, MeshLayout(2, 2, 2)):
        moved = make_mesh(same)
        again = load_checkpoint(target, build_model(DENSE, Build(jnp.float32, same)), mesh=moved)
        check_parts(DENSE, same, moved, again, tensors)
    stage = build_model(DENSE, Build(jnp.float32, layout, Stage(1, 2, is_first=False)))
    of_stage = load_checkpoint(target, stage, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, of_stage["layers"][0], params["layers"][1])
    for other, dtype in ((MeshLayout(1, 1, 4), "float32"), (layout, "bfloat16"), (MeshLayout(), "float32")):
        text = refusal(load_checkpoint, target, build_model(DENSE, Build(dtype, other)), mesh=make_mesh(other))
        assert "convert the model again" in text and "{'data': 1, 'attn': 2, 'model': 2}" in text, text
    assert "exists" in refusal(save_checkpoint, target, params, model, mesh=mesh)
    (target / "weights").rename(folder / "elsewhere")
    assert "weights: cannot be read" in refusal(load_checkpoint, target, model, mesh=mesh)
    (target / "layout.json").unlink()
    assert "layout.json: cannot be read" in refusal(load_checkpoint, target, model, mesh=mesh)


def load_as_one_of_two(folder: Path, number: int, port: str) -> None:
    """Prints bytes: read, growth of resident memory, of this process's parts, of the largest tensor."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    assert jax.device_count() == 4 and jax.local_device_count() == 2
    layout = MeshLayout(1, 1, 4)
    mesh = make_mesh(layout)
    model = build_model(LARGE, Build(jnp.float32, layout))
    dummy_params(build_model(DENSE, Build(jnp.float32)))  # what JAX sets up once is not the loader's memory
    source = SafetensorsCheckpoint(folder)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    loaded = load_params(model, source, mesh=mesh)
    grown = resident_bytes("VmHWM") - before
    source.close()
    own = sum(shard.data.nbytes for leaf in jax.tree.leaves(loaded) for shard in leaf.addressable_shards)
    tensors = random_tensors(LARGE)
    check_parts(LARGE, layout, mesh, loaded, tensors)

    model = build_model(DENSE, Build(jnp.float32, layout))
    params = dummy_params(model, mesh=mesh)
    plain = tensors_of(DENSE, dummy_params(build_model(DENSE, Build(jnp.float32))))
    check_parts(DENSE, layout, mesh, params, plain)
    scales = KVScales(*np.random.default_rng(0).random((2, 2, 4), np.float32))
    save_checkpoint(folder / "converted", params, model, mesh=mesh, kv_scales=scales)
    read = load_scales(folder / "converted", KVShape(2, (0, 1), 4, values_in_keys=False))
    np.testing.assert_array_equal(read, scales)
    check_parts(DENSE, layout, mesh, load_checkpoint(folder / "converted", model, mesh=mesh), plain)
    numbers = {"read": source.bytes_read, "grown": grown, "own": own}
    print(json.dumps(numbers | {"largest": max(tensor.nbytes for tensor in tensors.values())}))
    jax.distributed.shutdown()


def check_trainer(config: ModelConfig) -> None:
    """Gradients of jaxengine.rl.forward over weights that XLA splits, as on one device."""
    tokens = np.random.default_rng(0).integers(0, 200, (4, 11))
    segments = np.repeat([[0, 1, 2]], 4, 0).repeat([4, 5, 2], 1)
    layout = MeshLayout(2, 1, 2)
    mesh = make_mesh(layout)
    model = build_model(config, Build(jnp.float32))
    params = dummy_params(model, seed=1)

    def loss(params, tokens):
        logits = jax.nn.log_softmax(forward(model, params, tokens, segments, remat=True))
        return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], 2).mean()

    step = jax.jit(jax.value_and_grad(loss))
    value, grads = step(params, tokens)
    axes = [param.decl.axes for param in declared_params(model)]
    leaves, structure = jax.tree.flatten(params)
    leaves = [jax.device_put(leaf, named_sharding(mesh, each)) for leaf, each in zip(leaves, axes, strict=True)]
    assert any(not leaf.is_fully_replicated for leaf in leaves)
    with jax.set_mesh(mesh):
        split = structure.unflatten(leaves), jax.device_put(tokens, named_sharding(mesh, ("batch", None)))
        other, others = step(*split)
    assert abs(value - other) < 1e-5 * abs(value)
    for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(two)).max() <= 1e-5 * max(np.abs(one).max(), 1e-2)
    print(f"{config.architecture}: gradients over {layout}", flush=True)


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    mode, folder, *rest = sys.argv[1:]
    faulthandler.dump_traceback_later(360)  # where it waits, before the test loses its patience
    if mode == "meshes":
        load_into_meshes(Path(folder), thorough="--thorough" in rest)
    else:
        load_as_one_of_two(Path(folder), int(rest[0]), rest[1])
