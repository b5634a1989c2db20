"""Taps: what they give is what transformers' layers get and give, and their names say what a model has."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.taps import FINAL_NORM, Tap, TapError, all_taps, describe, layers_of, read_taps
from jaxengine.models.layers.taps import Taps, check_parts
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.unpaged import run_unpaged
from tests.fixtures import attended_checkpoints, whisper_checkpoints
from tests.fixtures.drawn_weights import FOLDER
from tests.models.conftest import load_recorded
from tests.tables import each_row


def _architecture(config: Path) -> str:
    return json.loads(config.read_text())["architectures"][0]


RECORDED = sorted(path.parent.name for path in FOLDER.glob("*/activations.npz"))
TOLERANCE = 2e-5  # of the largest


def test_ten_families_are_recorded():
    assert len(RECORDED) >= 10


@partial(jax.jit, static_argnums=(0, 3))
def _activations(graph, state, tokens, names):
    model = nnx.merge(graph, state)
    taps = read_taps(names, all_taps(model.config))
    section = Taps(tap for tap in taps if tap.kind != FINAL_NORM)
    normed, _ = run_unpaged(model, tokens[None], sections={"taps": section})
    return {tap.name: normed[0] if tap.kind == FINAL_NORM else section[tap] for tap in taps}


# Dense, experts with sinks, latents, states beside attention, states in its place.
FEW = ("llama", "gpt_oss", "deepseek_v3", "falcon_h1", "qwen3_next")


@each_row("name", FEW)
def test_taps_give_what_transformers_computes(name):
    assert_activations(name)


@pytest.mark.thorough("further families of the same layers")
@each_row("name", [name for name in RECORDED if name not in FEW])
def test_taps_of_further_families_give_what_transformers_computes(name):
    assert_activations(name)


def assert_activations(name: str) -> None:
    recorded = load_recorded(name)
    with np.load(FOLDER / name / "activations.npz") as wanted:
        names = tuple(sorted(key for key in wanted if key != "tokens"))
        found = _activations(*nnx.split(recorded.model), recorded.prompts[1], names)
        for key in names:
            own = np.asarray(found[key])[wanted["tokens"]]
            assert np.abs(own - wanted[key]).max() <= TOLERANCE * max(1.0, np.abs(wanted[key]).max()), key
    routed = layers_of(read_taps(names, all_taps(recorded.config))).get("router_logits")
    if name != "granite_hybrid":  # its router is no module of the MLP
        assert routed == all_taps(recorded.config).get("router_logits")


# Their layers read keys of blocks from pages, or a sound.
PAGED = {"deepseek_v4", "deepseek_v41_plain", *whisper_checkpoints.SIZES, *attended_checkpoints.KINDS}
# Layers without attention or MLP, that have them in another module, or whose attention takes more than others.
PARTS = {
    "decilm": "residual:0-5, attention_output:0 and 2 and 4, mlp_output:0-1 and 4, final_norm",
    "dory": "attention_output:0-5, mlp_output:0-5, final_norm",
    "inkling": "residual:0-3, attention_output:0-2, mlp_output:0-2, router_logits:1-2, final_norm",
    "mamba": "residual:0-3, attention_output:0-2, final_norm",
    "mllama_text": "residual:0-4, attention_output:0 and 2, mlp_output:0 and 2, final_norm",
    "mllama_vision": "residual:0-5, attention_output:0 and 2 and 4, mlp_output:0 and 2 and 4, final_norm",
    "nemotron_h": "residual:0-6, attention_output:0 and 2 and 4, mlp_output:1 and 3 and 5, router_logits:3 and 5, "
    "final_norm",
    "qwen4_exp": "attention_output:0-3, mlp_output:0-3, router_logits:0-3, final_norm",
    "zamba2": "attention_output:0-2, mlp_output:1-2, final_norm",
    "zaya": "attention_output:0-2, mlp_output:0-2, router_logits:0-2, final_norm",
}


@each_row("name", PARTS)
def test_layers_have_the_parts_that_their_taps_name(name):
    assert describe(assert_parts(name)) == PARTS[name]


@pytest.mark.thorough("all families, of which few have other layers than Llama")
@each_row("name", sorted({_architecture(path): path.parent.name for path in FOLDER.glob("*/config.json")}.values()))
def test_layers_of_every_family_have_the_parts_that_their_taps_name(name):
    assert_parts(name)


def assert_parts(name: str) -> dict[str, list[int]]:
    """The taps of a recorded model, whose layers have them and run with all of them recorded."""
    model = build_model(read_folder(FOLDER / name), Build("float32"))
    found = all_taps(model.config)
    taps = [Tap(kind, layer) for kind, layers in found.items() for layer in layers]
    check_parts("capture", name, model.layers, range(model.config.num_layers), taps)
    graph, state = nnx.split(model)

    def run(state: nnx.State, tokens: jax.Array) -> list[jax.Array]:
        section = Taps(tap for tap in taps if tap.kind != FINAL_NORM)
        run_unpaged(nnx.merge(graph, state), tokens, sections={"taps": section})
        return [section[tap] for tap in taps if tap.kind != FINAL_NORM]

    if name not in PAGED:
        jax.eval_shape(run, state, jax.ShapeDtypeStruct((1, 8), np.int32))
    return found


KNOWN = {"residual": [0, 1, 2], "attention_output": [0, 1], "router_logits": [1], "final_norm": [0]}


@each_row(
    "names, found",
    [
        (["residual:1"], "residual:1"),
        (["residual:-1", "residual:-3"], "residual:2 residual:0"),
        (["residual:1-2", "residual:*"], "residual:1 residual:2 residual:0"),
        (["router_logits:*", "router_logits:-1", "final_norm"], "router_logits:1 final_norm"),
    ],
)
def test_names_stand_for_taps(names, found):
    assert " ".join(tap.name for tap in read_taps(names, KNOWN)) == found


@each_row(
    "name, allowed",
    [
        ("residual:3", "residual:0-2, attention_output:0-1, router_logits:1, final_norm"),
        ("residual:-4", "residual:0-2"),
        ("residual:2-1", "residual:0-2"),
        ("residual:1-3", "residual:0-2"),
        ("router_logits:0", "router_logits:1"),
        ("mlp_output:0", "residual:0-2"),
        ("residual", "such as"),
        ("final_norm:0", "such as"),
        ("layers.3.out", "such as"),
        ("residual:1,2", "such as"),
        ("", "such as"),
        ("residual:0-999999", "residual:0-2"),
    ],
)
def test_other_names_are_refused(name, allowed):
    with pytest.raises(TapError) as refused:
        read_taps([name], KNOWN)
    assert allowed in refused.value.allowed and refused.value.name == name


def test_the_last_layer_is_the_models_and_not_the_engines():
    """An engine may have some of a model's taps; a request names them from the model's end."""
    model = {"residual": [0, 1, 2, 3], "router_logits": [1, 3], "final_norm": [0]}
    some = {"residual": [1, 2], "router_logits": [1], "final_norm": [0]}
    names = ["residual:-2", "residual:-3", "router_logits:-2", "residual:*", "final_norm"]
    found = "residual:2 residual:1 router_logits:1 final_norm"
    assert " ".join(tap.name for tap in read_taps(names, some, model)) == found
    for name in ("residual:-1", "residual:-4", "residual:-5", "router_logits:-1"):
        with pytest.raises(TapError) as refused:
            read_taps([name], some, model)
        assert "residual:1-2, router_logits:1" in refused.value.allowed
        assert f"{name} counts from the end of the model's" in refused.value.allowed


def test_layers_are_shown_in_spans():
    assert describe({"residual": [0, 1, 2, 4, 6, 7]}) == "residual:0-2 and 4 and 6-7"
