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

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts import expert_rows, moe
from jaxengine.models.layers.experts.moe import ExpertLoad, GivenExperts, MixtureOfExperts
from jaxengine.models.params.declare import declared_params
from jaxengine.models.registry import build_model, read_hf
from jaxengine.pallas_kernels import registry
from jaxengine.sharding.layout import GATHER, RAGGED, MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.rules import logical_to_spec
from tests.models.tiny import TINY

ROOT = Path(__file__).parents[3]
EXPERTS = ExpertsConfig(num_experts=8, num_per_token=3, intermediate_size=16)
CONFIG = replace(TINY, architecture="Qwen3MoeForCausalLM", experts=EXPERTS)
# What other families' experts have beside.
ALL = replace(
    EXPERTS,
    scoring_func="sigmoid",
    correction_bias=True,
    num_expert_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    bias=True,
    shared_intermediate_size=40,
    shared_gate=True,
)
NUM_TOKENS = 32


def make_layer(config: ModelConfig = CONFIG, *, dtype: str = "float32") -> MixtureOfExperts:
    """With weights that follow from the configuration."""
    layer = MixtureOfExperts(config, source="m", build=Build(jnp.dtype(dtype)))
    rng, drawn = np.random.default_rng(0), []
    for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        values = param.get_value()
        scale = 1.0 if "bias" in str(path[0]) else 3 * values.shape[-2] ** -0.5
        drawn.append((path, param.replace(jnp.asarray(scale * rng.standard_normal(values.shape), values.dtype))))
    nnx.update(layer, nnx.from_flat_state(drawn))
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
    experts, params = layer.experts, {}
    for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        params[".".join(map(str, path)).removesuffix(".values")] = np.asarray(param.get_value(), np.float64)
    router, gate_up, down = params["router"], params["gate_up"], params["down"]
    x = np.asarray(x, np.float64)
    out, load = np.zeros_like(x), np.zeros(experts.num_experts, int)
    zeros = np.zeros(experts.num_experts)
    for token, row in enumerate(x):
        logits = row @ router + params.get("router_bias", zeros)
        scores = (
            1 / (1 + np.exp(-logits)) if experts.scoring_func == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        )
        choices = scores + params.get("correction_bias", zeros)
        groups = np.split(np.arange(experts.num_experts), experts.num_expert_group)
        best_of = 2 if experts.correction_bias else 1
        by_group = sorted(groups, key=lambda group: -np.sort(choices[group])[-best_of:].sum())
        allowed = np.sort(np.concatenate(by_group[: experts.topk_group]))
        chosen = allowed[np.argsort(-choices[allowed], kind="stable")][: experts.num_per_token]
        total = scores[chosen].sum() if experts.norm_weights else 1.0
        for expert in chosen:
            weight = experts.routed_scaling_factor * scores[expert] / total
            scaled, weight = (row * weight, 1.0) if experts.apply_router_weight_on_input else (row, weight)
            inner = activated(scaled @ gate_up[expert] + params.get("gate_up_bias", zeros[:, None])[expert])
            out[token] += weight * (inner @ down[expert] + params.get("down_bias", zeros[:, None])[expert])
            load[expert] += 1
        if experts.shared_intermediate_size:
            gate = 1 / (1 + np.exp(-row @ params["shared_gate"])) if experts.shared_gate else 1.0
            out[token] += gate * (activated(row @ params["shared.gate_up.weight"]) @ params["shared.down.weight"])
    return out, load


def activated(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize(
    "experts",
    [
        EXPERTS,
        replace(EXPERTS, norm_weights=False),
        replace(EXPERTS, num_per_token=1, apply_router_weight_on_input=True, norm_weights=False),
        replace(EXPERTS, num_per_token=8),
        replace(EXPERTS, num_expert_group=4, topk_group=2, shared_intermediate_size=24),
        ALL,
    ],
    ids=["plain", "not normalised", "weights on inputs", "every expert", "groups", "all"],
)
def test_against_a_loop_over_tokens(experts):
    layer = make_layer(replace(CONFIG, experts=experts))
    (got, load), (expected, expected_load) = run(layer, tokens()), oracle(layer, tokens())
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(load, expected_load)


@pytest.mark.parametrize("experts", [replace(EXPERTS, apply_router_weight_on_input=True), ALL], ids=["inputs", "all"])
def test_rows_of_experts_are_filled_up(experts, monkeypatch):
    """As for the kernel of TPUs: what fills them up is in no sum, be it a token that is not finite."""
    monkeypatch.setattr(moe, "group_step", lambda num_rows, num_groups: 8)
    seen, multiply = [], MixtureOfExperts._multiply
    monkeypatch.setattr(MixtureOfExperts, "_multiply", lambda *given: seen.append(given[1:3]) or multiply(*given))
    layer = make_layer(replace(CONFIG, experts=experts))
    is_token = np.arange(NUM_TOKENS) % 3 > 0
    x = jnp.where(is_token[:, None], tokens(), jnp.inf)
    got = np.asarray(layer(x, Rows(jnp.asarray(is_token))))
    rows, sizes = seen[-1]
    assert rows.shape[0] == NUM_TOKENS * experts.num_per_token + 7 * experts.num_experts
    assert not (sizes % 8).any() and sizes.sum() >= is_token.sum() * experts.num_per_token
    expected = oracle(layer, tokens()[is_token])[0]
    np.testing.assert_allclose(got[is_token], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


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
    for mesh in (MeshLayout(attn=3), MeshLayout(data=3, attn=32)):
        with pytest.raises(ValueError, match="cannot be split"):
            build_model(CONFIG, Build(jnp.float32, mesh))
    for mesh in (MeshLayout(data=4, model=2, expert_parallel=True), MeshLayout(data=3, expert_parallel=True)):
        build_model(CONFIG, Build(jnp.float32, mesh))


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
    return gate_up.reshape(*gate_up.shape[:-1], 2, parts, -1).swapaxes(-3, -2).reshape(gate_up.shape)


def all_to(expert: int, count: int) -> GivenExperts:
    """As a table of experts by token ids, or a trainer, may give them: one expert for all of a token's k."""
    return GivenExperts(jnp.full((count, EXPERTS.num_per_token), expert, jnp.int32))


def split_over(layout: MeshLayout, config: ModelConfig, *several: jax.Array, given: int | None = None):
    """What `layout` makes of the tokens, or of several others: all ranks' results and loads, and the number of
    collectives by kind. given: the expert to which all tokens go instead, k times each."""
    layer = MixtureOfExperts(config, source="m", build=Build(jnp.float32, layout))
    parts = {"gate_up": 1 if layout.expert_parallel else layout.num_shards("ffn")}
    parts |= {"gate_up_bias": parts["gate_up"], "shared": layout.num_shards("ffn")}
    graph, state = nnx.split(layer)
    flat = []
    for (path, param), (_, plain) in zip(
        nnx.to_flat_state(state), nnx.to_flat_state(nnx.state(make_layer(config), nnx.Param)), strict=True
    ):
        values = np.asarray(plain.get_value())
        joined = path[0] in parts and "down" not in path
        flat.append((path, param.replace(jnp.asarray(by_parts(values, parts[path[0]]) if joined else values))))
    state = nnx.from_flat_state(flat)
    specs = jax.tree.map(
        lambda param: param.replace(logical_to_spec(param.get_metadata()["decl"].axes)),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Param),
    )

    def run(state, x, is_token):
        layer = nnx.merge(graph, state)
        layer.given = None if given is None else all_to(given, len(x))
        return layer(x, Rows(is_token)), nnx.pop(layer, ExpertLoad)["load"][...][None]

    batch = PartitionSpec(("data", "attn"))
    mesh = make_mesh(layout)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs, batch, batch), out_specs=(batch, batch), check_vma=False)
    is_token = jnp.arange(NUM_TOKENS) % 5 > 0
    program = jax.jit(sharded).lower(state, tokens(), is_token).compile()
    text = program.as_text()
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    counted = {kind: text.count(f" {kind}(") for kind in kinds}
    made = [tuple(map(np.asarray, program(state, x, is_token))) for x in several or (tokens(),)]
    return made, counted


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


# With everything that a layer may have. A shared MLP is added up with the experts; where its parts are on devices with
# other tokens, and the experts' on more of these, it leaves each its tokens before that.
LAYOUTS_OF_ALL = {
    "tp 4, 2 kv heads": (MeshLayout(attn=2, model=2), 3, 1, 1),
    "ep of dp 2, tp 2": (MeshLayout(data=2, model=2, expert_parallel=True), 3, 1, 1),
    "ep of attn 2, tp 2": (MeshLayout(attn=2, model=2, expert_parallel=True), 3, 1, 1),
    "ep of dp 2, attn 2, tp 2": (MeshLayout(data=2, attn=2, model=2, expert_parallel=True), 3, 1, 2),
}


def check_layouts(
    names: Sequence[str] = (*LAYOUTS, *LAYOUTS_OF_ALL), grouped: str = "cpu.grouped", block: int = 8, step: int = 1
) -> None:
    """Run in a process with eight devices: the same result as one device, exchanging no more than it must.

    grouped: the implementation of grouped products that all of them have, one device's being the CPU's.
    block: rows that a device with whole experts takes at a time. step: to multiples of which experts' are filled up.
    """
    expert_rows._LEAST_ROWS = expert_rows._MOST_ROWS = block
    assert jax.device_count() == 8
    is_token = np.arange(NUM_TOKENS) % 5 > 0
    assert registry._ROWS["grouped_matmul", "cpu"] == "matmul.cpu.grouped"
    everything = replace(CONFIG, experts=ALL)
    expected = {config: run(make_layer(config), tokens(), jnp.asarray(is_token)) for config in (CONFIG, everything)}
    registry._ROWS["grouped_matmul", "cpu"] = f"matmul.{grouped}"
    moe.group_step = lambda num_rows, num_groups: step
    cases = [(name, CONFIG, *LAYOUTS[name]) for name in LAYOUTS if name in names]
    cases += [(name, everything, *LAYOUTS_OF_ALL[name]) for name in LAYOUTS_OF_ALL if name in names]
    for name, config, layout, gathers, all_reduces, reduce_scatters in cases:
        (y, total), ([(got, load)], collectives) = expected[config], split_over(layout, config)
        np.testing.assert_allclose(got, y, rtol=0, atol=1e-5 * np.abs(y).max(), err_msg=name)
        assert load.shape == (layout.num_ranks, 8), name
        np.testing.assert_array_equal(load.sum(axis=0), total, err_msg=name)
        wanted = {"all-gather": gathers, "all-reduce": all_reduces, "reduce-scatter": reduce_scatters}
        counted = collectives == wanted | {"all-to-all": 0, "collective-permute": 0}
        assert counted, (name, collectives)
    check_routing(MeshLayout(data=2, model=2, expert_parallel=True))
    check_repeated(is_token)
    print("as on one device")


def check_routing(layout: MeshLayout) -> None:
    """Whole experts: what a token gets is the same bit for bit among others, however many blocks these make, and right
    where all go to the same experts."""
    x, alike = tokens(), jnp.repeat(tokens()[1:2], NUM_TOKENS, axis=0)
    among = alike.at[11:15].set(x[11:15])
    (found, of_alike, of_among), _ = split_over(layout, CONFIG, x, alike, among)
    np.testing.assert_array_equal(of_among[0][11:15], found[0][11:15])
    np.testing.assert_array_equal(of_among[0][6], found[0][1])
    assert (of_alike[1].sum(axis=0) > 0).sum() == EXPERTS.num_per_token
    np.testing.assert_array_equal(of_alike[0][1::5], np.repeat(found[0][1:2], len(alike[1::5]), axis=0))


def check_repeated(is_token: np.ndarray) -> None:
    """Devices with fewer whole experts than a token has rows there, one expert's: none is dropped."""
    layer = make_layer()
    layer.given = all_to(5, NUM_TOKENS)
    expected, total = run(layer, tokens(), jnp.asarray(is_token))
    assert total[5] == total.sum() > 0
    for backend in (GATHER, RAGGED):
        layout = MeshLayout(data=2, model=4, expert_parallel=True, all2all_backend=backend)
        ((got, load),), _ = split_over(layout, CONFIG, given=5)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=backend)
        np.testing.assert_array_equal(load.sum(axis=0), total, err_msg=backend)


_BY_ENGINES = pytest.mark.thorough("an engine shares them in test_parallel_tokens.py")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("", marks=_BY_ENGINES, id="cpu"),
        pytest.param(
            "('tp 4, 2 kv heads', 'ep of tp 4', 'ep of dp 2, tp 2'), 'xla.grouped', 128", marks=_BY_ENGINES, id="gpu"
        ),
        pytest.param("('ep of tp 4',), step=8", id="filled up"),
    ],
)
def test_devices_share_the_experts(arguments):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    script = f"from tests.models.layers.test_moe import check_layouts; check_layouts({arguments})"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    assert "as on one device" in done.stdout


@pytest.mark.parametrize("bias", [False, True])
def test_results_of_experts_are_as_wide_as_the_tokens(bias):
    """In float32 those of all rows were most of a step's temporaries."""
    layer = make_layer(replace(CONFIG, experts=replace(EXPERTS, bias=bias)), dtype="bfloat16")
    rows, sizes = tokens(96, "bfloat16"), jnp.full(8, 12, jnp.int32)
    assert jax.eval_shape(lambda: layer._multiply(rows, sizes, None)).dtype == jnp.bfloat16
