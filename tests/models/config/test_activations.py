"""Activations of MLPs, of experts and before states, and switches of parts that few files have, as in transformers."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.layers.base.activations import gated_by
from jaxengine.models.layers.base.mlp import MLP, GatedMLP
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.registry import build_model, read_hf
from tests.models.config.test_as_transformers import recorded
from tests.tables import each_row

GATE = {"qwen4_exp": {"output_gate_type": "sigmoid"}}  # by default the activation, of which it takes two


def of_text(name: str, **own: Any) -> dict[str, Any]:
    """The same with changes of the text's fields, which may be nested."""
    raw = recorded(name)
    return {**raw, **({"text_config": raw["text_config"] | own} if "text_config" in raw else own)}


@each_row(
    ("name", "field"),
    [
        *((name, "hidden_act") for name in ("llama", "decilm", "mllama_text", "phi3", "glm", "gemma", "nemotron")),
        *((name, "hidden_act") for name in ("starcoder2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe")),
        *(
            (name, "hidden_act")
            for name in ("dots1", "minimax_m2", "hunyuan_moe", "ernie4_5_moe", "glm4_moe", "llama4")
        ),
        *((name, "hidden_act") for name in ("deepseek_v2", "deepseek_v3", "cohere2_moe", "beam", "laguna", "phimoe")),
        *((name, "hidden_act") for name in ("minicpm3", "longcat_flash", "ernie4_5_vl_vision", "falcon_h1")),
        *((name, "hidden_act") for name in ("qwen3_next", "qwen3_5", "granite_hybrid", "granite_hybrid_dense")),
        *((name, "hidden_act") for name in ("bamba", "jamba", "kimi_linear", "bailing_hybrid", "lara_mini", "minimax")),
        *((name, "hidden_act") for name in ("olmo_hybrid", "qwen4_exp", "zamba", "zamba2", "inkling", "zaya")),
        *((name, "hidden_act") for name in ("mistral_large4_vision", "dots3_note", "apertus")),
        ("jetmoe", "activation_function"),
        ("nemotron_h", "mlp_hidden_act"),
        ("muse_spark", "hidden_act"),
        *((name, "hidden_activation") for name in ("gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_moe")),
    ],
)
def test_mlps_and_experts_have_the_activation_of_the_file(name, field):
    """Each family that makes them by itself; those of others are Llama's."""
    config = read_hf(of_text(name, **{field: "relu"}, **GATE.get(name, {})))
    made = nnx.eval_shape(lambda: build_model(config, Build("float32")))
    nodes = [node for _, node in nnx.iter_graph(made) if isinstance(node, (GatedMLP, MLP, MixtureOfExperts))]
    found = {getattr(node.activation, "activation", node.activation) for node in nodes}
    assert found and found <= {jax.nn.relu, gated_by("relu")}
    assert not any(node.fuses for node in nodes if isinstance(node, MixtureOfExperts) and node.is_gated)


@each_row("name", ["deepseek_v4", "glm5_next", "hy_v4", "dory", "aria_text"])
def test_what_is_clamped_has_the_activation_of_the_file(name):
    """But the experts of some families have a SiLU, as in transformers."""
    made = nnx.eval_shape(lambda: build_model(read_hf(of_text(name, hidden_act="relu")), Build("float32")))
    nodes = [node for _, node in nnx.iter_graph(made) if isinstance(node, (GatedMLP, MixtureOfExperts))]
    experts = {of_clamped(node.activation) for node in nodes if isinstance(node, MixtureOfExperts)}
    experts |= {jax.nn.relu} if name == "dory" else set()
    mlps = {of_clamped(node.clamped or node.activation) for node in nodes if isinstance(node, GatedMLP)}
    assert mlps == {jax.nn.relu}
    assert experts == {jax.nn.silu if name in ("aria_text", "glm5_next", "hy_v4") else jax.nn.relu}


def of_clamped(function: Any) -> Any:
    """The activation in a function of gate and up."""
    plain = {gated_by("relu"): jax.nn.relu, gated_by("silu"): jax.nn.silu}.get(function)
    return plain or getattr(function, "activation", function)


@each_row(
    ("name", "field"),
    [
        *((name, "hidden_act") for name in ("qwen3_next", "qwen3_5", "qwen4_exp", "olmo_hybrid", "kimi_linear")),
        *((name, "hidden_act") for name in ("bailing_hybrid", "glm5_next", "lara_mini", "minimax")),
        *((name, "hidden_act") for name in ("bamba", "falcon_h1", "granite_hybrid", "jamba")),
        *((name, "hidden_act") for name in ("mamba", "falcon_mamba", "mamba2")),
        ("nemotron_h", "mamba_hidden_act"),
        ("zamba", "hidden_mamba_act"),
    ],
)
def test_convolutions_before_states_have_the_activation_of_the_file(name, field):
    states = [layer.state for layer in read_hf(of_text(name, **{field: "relu"}, **GATE.get(name, {}))).attention]
    assert {state.activation for state in states if state is not None} == {"relu"}


@each_row("name", ["llama", "stablelm", "laguna"])
def test_swish_is_silu(name):
    assert read_hf(recorded(name, hidden_act="swish")) == read_hf(recorded(name, hidden_act="silu"))


@each_row(("name", "has_head"), [("ernie4_5_moe", True), ("ernie4_5_vl_vision", False)])
def test_biases_of_ernie_with_experts(name, has_head):
    """One switch for all, but logits have one only without a tower."""
    config = read_hf(of_text(name, use_bias=True))
    made = nnx.eval_shape(lambda: build_model(config, Build("float32")))
    mlps = [node for _, node in nnx.iter_graph(made.layers) if isinstance(node, GatedMLP)]
    assert all(each.gate_up.bias is not None and each.down.bias is not None for each in mlps) and len(mlps) > 1
    assert all(layer.bias and layer.output_bias for layer in config.attention)
    assert (made.head_bias is not None) == has_head


def test_router_logits_and_gates_of_laguna():
    experts = read_hf(recorded("laguna", moe_router_logit_softcapping=1.5)).experts
    assert experts is not None and experts.logit_soft_cap == 1.5
    assert read_hf(recorded("laguna", moe_router_logit_softcapping=0.0)) == read_hf(recorded("laguna"))
    assert read_hf(recorded("laguna_elements", gating=False)) == read_hf(recorded("laguna_elements"))
