"""The mixture-of-experts layer against a loop over tokens, on one device and split over several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.build import Build
from models.config.experts import ExpertsConfig
from models.config.fields import ModelConfigError
from models.config.hf import read_config_json
from models.config.model_config import ModelConfig
from models.layers.mlp import GatedMLP
from models.layers.moe import ExpertLoad, ExpertNames, MixtureOfExperts
from models.layers.rows import Rows
from models.registry import build_model, read_hf
from models.weights.declare import declared_params
from pallas_kernels import registry
from sharding.layout import MeshLayout
from sharding.mesh import make_mesh
from sharding.rules import logical_to_spec
from tests.models.tiny import TINY

ROOT = Path(__file__).parents[3]
NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")
EXPERTS = ExpertsConfig(num_experts=8, num_per_token=3, intermediate_size=16)
CONFIG = replace(TINY, architecture="Qwen3MoeForCausalLM", experts=EXPERTS)
NUM_TOKENS = 32


def make_layer(config: ModelConfig = CONFIG, *, dtype: str = "float32") -> MixtureOfExperts:
    """With weights that follow from the configuration."""
    layer = MixtureOfExperts(config, source="m", names=NAMES, build=Build(jnp.dtype(dtype)))
    rng = np.random.default_rng(0)
    for weight in (layer.router, layer.gate_up, layer.down):
        param = weight.values
        scale = 3 * param.shape[-2] ** -0.5
        param.set_value(jnp.asarray(scale * rng.standard_normal(param.shape), dtype))
    return layer


def tokens(count: int = NUM_TOKENS, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, CONFIG.hidden_size)), dtype)


@cache
def compiled(graph):
    """(state, x, is_token) -> the layer's result and its load."""

    def run(state, x, is_token):
        layer = nnx.merge(graph, state)
        return layer(x, Rows(is_token)), nnx.pop(layer, ExpertLoad)["load"][...]

    return jax.jit(run)


def run(layer: MixtureOfExperts, x: jax.Array, is_token=None) -> tuple[np.ndarray, np.ndarray]:
    is_token = jnp.ones(len(x), bool) if is_token is None else is_token
    graph, state = nnx.split(layer)
    y, load = compiled(graph)(state, x, is_token)
    return np.asarray(y), np.asarray(load)


def oracle(layer: MixtureOfExperts, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """float64 result and tokens per expert, one token and expert at a time."""
    x, router, gate_up, down = (
        np.asarray(a, np.float64)
        for a in (x, *(weight.values[...] for weight in (layer.router, layer.gate_up, layer.down)))
    )
    out, load = np.zeros_like(x), np.zeros(layer.experts.num_experts, int)
    for token, row in enumerate(x):
        probabilities = np.exp(row @ router)
        probabilities /= probabilities.sum()
        chosen = np.argsort(-probabilities, kind="stable")[: layer.experts.num_per_token]
        total = probabilities[chosen].sum() if layer.experts.norm_weights else 1.0
        for expert in chosen:
            gate, up = np.split(row @ gate_up[expert], 2)
            out[token] += probabilities[expert] / total * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
            load[expert] += 1
    return out, load


@pytest.mark.parametrize("changes", [{}, {"norm_weights": False}, {"num_per_token": 1}, {"num_per_token": 8}])
def test_against_a_loop_over_tokens(changes):
    layer = make_layer(replace(CONFIG, experts=replace(EXPERTS, **changes)))
    (got, load), (expected, expected_load) = run(layer, tokens()), oracle(layer, tokens())
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(load, expected_load)


def test_bfloat16():
    layer, x = make_layer(dtype="bfloat16"), tokens(dtype="bfloat16")
    (got, _), (expected, _) = run(layer, x), oracle(layer, x)
    assert got.dtype == jnp.bfloat16
    error = np.abs(got.astype(np.float64) - expected).max()
    assert 0 < error < 0.02 * np.abs(expected).max()


def test_experts_of_equal_probability_come_in_order():
    layer = make_layer()
    layer.router.values.set_value(jnp.zeros_like(layer.router.values[...]).at[:, 6].set(1.0))
    weights, ids = layer.route(jnp.ones((2, CONFIG.hidden_size)))
    np.testing.assert_array_equal(ids, [[6, 0, 1]] * 2)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)


def test_padding_goes_to_no_expert():
    layer, x = make_layer(), tokens()
    is_token = np.arange(NUM_TOKENS) % 3 > 0
    got, load = run(layer, x, jnp.asarray(is_token))
    expected, expected_load = oracle(layer, x[is_token])
    assert not got[~is_token].any()
    np.testing.assert_allclose(got[is_token], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(load, expected_load)


def test_a_token_does_not_depend_on_its_neighbours():
    """Bit for bit, wherever it stands and whichever experts the others go to."""
    layer, x = make_layer(), tokens()
    alone = run(layer, x)[0]
    moved = np.asarray(jnp.concatenate([-x[:5], x[20:], 0.1 * x[:15]]))
    np.testing.assert_array_equal(run(layer, jnp.asarray(moved))[0][5:17], alone[20:])


def test_layers_without_experts():
    config = replace(CONFIG, experts=replace(EXPERTS, dense_layers=(0, 2)))
    kinds = [type(layer.mlp) for layer in build_model(config, Build(jnp.float32)).layers]
    assert kinds == [GatedMLP, MixtureOfExperts, GatedMLP]
    with pytest.raises(ModelConfigError, match="experts must be set for Qwen3MoeForCausalLM, got None"):
        build_model(replace(config, experts=None), Build(jnp.float32))


def test_names_in_checkpoints(checkpoints):
    for name, expected in (
        ("mixtral", "model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.{expert}.up_proj.weight"),
    ):
        model = build_model(read_hf(read_config_json(checkpoints / name)), Build(jnp.float32))
        gate_ups = [param for param in declared_params(model) if param.name.endswith("mlp.gate_up.values")]
        assert expected in [source.name for param in gate_ups for source in param.decl.sources]


def test_a_number_of_devices_that_cannot_share_the_experts():
    for mesh in (MeshLayout(data=3, expert_parallel=True), MeshLayout(attn=3), MeshLayout(data=3, attn=32)):
        with pytest.raises(ValueError, match="cannot be split"):
            build_model(CONFIG, Build(jnp.float32, mesh))
    build_model(CONFIG, Build(jnp.float32, MeshLayout(data=4, model=2, expert_parallel=True)))


def raw_config(checkpoints: Path, name: str) -> dict:
    return json.loads((checkpoints / name / "config.json").read_text())


def test_what_is_read_from_config_json(checkpoints):
    mixtral = read_hf(raw_config(checkpoints, "mixtral"))
    assert mixtral.experts == ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=16)
    assert [layer.window for layer in mixtral.attention] == [8, 8] and not mixtral.attention[0].qk_norm
    raw = raw_config(checkpoints, "qwen3_moe")
    qwen = read_hf(raw)
    assert qwen.experts == ExpertsConfig(8, 3, 16, norm_weights=False, dense_layers=(1,))
    assert qwen.attention[0].qk_norm and qwen.intermediate_size == 80
    older = {key: value for key, value in raw.items() if key != "num_local_experts"} | {"num_experts": 4}
    assert read_hf(older).experts == replace(qwen.experts, num_experts=4)
    every_second = read_hf({**raw, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert every_second.experts is not None and every_second.experts.dense_layers == (0, 2, 3, 4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_per_token must be at most num_experts = 8, got 9"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts must be an integer >= 1"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layer indices >= 0"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer >= 1"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ],
)
def test_unusable_config(checkpoints, name, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf({**raw_config(checkpoints, name), **changes})


def test_unusable_sizes():
    for name in ("num_experts", "num_per_token", "intermediate_size"):
        with pytest.raises(ModelConfigError, match=f"{name} must be an integer >= 1 and <= .*, got 0"):
            replace(EXPERTS, **{name: 0})


def by_parts(gate_up: np.ndarray, parts: int) -> np.ndarray:
    """Columns gate | up as a mesh of `parts` has them: gate | up of each part after the other."""
    experts, size, columns = gate_up.shape
    return gate_up.reshape(experts, size, 2, parts, -1).swapaxes(2, 3).reshape(experts, size, columns)


def split_over(layout: MeshLayout) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """What `layout` makes of the tokens: all ranks' results and loads, and the number of collectives by kind."""
    plain = make_layer()
    layer = MixtureOfExperts(CONFIG, source="m", names=NAMES, build=Build(jnp.float32, layout))
    parts = 1 if layout.expert_parallel else layout.num_shards("ffn")
    layer.gate_up.values.set_value(jnp.asarray(by_parts(np.asarray(plain.gate_up.values[...]), parts)))
    layer.router.values.set_value(plain.router.values[...])
    layer.down.values.set_value(plain.down.values[...])
    graph, state = nnx.split(layer)
    specs = jax.tree.map(
        lambda param: param.replace(logical_to_spec(param.get_metadata()["decl"].axes)),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Param),
    )

    def run(state, x, is_token):
        layer = nnx.merge(graph, state)
        return layer(x, Rows(is_token)), nnx.pop(layer, ExpertLoad)["load"][...][None]

    batch = PartitionSpec(("data", "attn"))
    mesh = make_mesh(layout)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs, batch, batch), out_specs=(batch, batch), check_vma=False)
    program = jax.jit(sharded).lower(state, tokens(), jnp.arange(NUM_TOKENS) % 5 > 0).compile()
    text = program.as_text()
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    y, load = program(state, tokens(), jnp.arange(NUM_TOKENS) % 5 > 0)
    return np.asarray(y), np.asarray(load), {kind: text.count(f" {kind}(") for kind in kinds}


# tokens are gathered with their weights and experts; name: layout, gathers, all-reduces, reduce-scatters
LAYOUTS = {
    "tp 2": (MeshLayout(model=2), 0, 1, 0),
    "tp 4": (MeshLayout(model=4), 0, 1, 0),
    "tp 4, 2 kv heads": (MeshLayout(attn=2, model=2), 3, 1, 1),
    "dp 2, tp 2": (MeshLayout(data=2, model=2), 0, 1, 0),
    "ep of tp 4": (MeshLayout(model=4, expert_parallel=True), 0, 1, 0),
    "ep of dp 2, tp 2": (MeshLayout(data=2, model=2, expert_parallel=True), 3, 1, 1),
    "ep of dp 4": (MeshLayout(data=4, expert_parallel=True), 3, 0, 1),
    "ep of dp 2, attn 2, tp 2": (MeshLayout(data=2, attn=2, model=2, expert_parallel=True), 3, 1, 1),
}


def check_layouts(names: Sequence[str] = tuple(LAYOUTS), grouped: str = "grouped_xla") -> None:
    """Run in a process with eight devices: the same result as one device, exchanging no more than it must.

    grouped: the implementation of grouped products that all of them have, one device's being the CPU's.
    """
    assert jax.device_count() == 8
    is_token = np.arange(NUM_TOKENS) % 5 > 0
    expected, expected_load = run(make_layer(), tokens(), jnp.asarray(is_token))
    assert registry._MODULES["grouped_matmul", "cpu"] == "matmul.grouped_xla"
    registry._MODULES["grouped_matmul", "cpu"] = f"matmul.{grouped}"
    for name in names:
        layout, gathers, all_reduces, reduce_scatters = LAYOUTS[name]
        got, load, collectives = split_over(layout)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)
        assert load.shape == (layout.num_ranks, 8), name
        np.testing.assert_array_equal(load.sum(axis=0), expected_load, err_msg=name)
        wanted = {"all-gather": gathers, "all-reduce": all_reduces, "reduce-scatter": reduce_scatters}
        assert collectives == wanted | {"all-to-all": 0, "collective-permute": 0}, (name, collectives)
    print("as on one device")


@pytest.mark.parametrize(
    "arguments", ["", "('tp 4, 2 kv heads', 'ep of tp 4', 'ep of dp 2, tp 2'), 'grouped_tiles'"], ids=["cpu", "gpu"]
)
def test_devices_share_the_experts(arguments):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    script = f"from tests.models.layers.test_moe import check_layouts; check_layouts({arguments})"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    assert "as on one device" in done.stdout
