"""jaxengine.rl.forward: logits and gradients of every kind of layer against those that transformers recorded.

Golden logits: tests/fixtures/recorders/models.py; gradients: tests/fixtures/recorders/gradients.py.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.pooler import Pooler
from jaxengine.models.model_classes import MODELS
from jaxengine.models.quantization.registry import rounded
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.pallas_kernels.attention import unpaged
from jaxengine.rl import forward, hidden_states, log_probs
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage
from tests.fast_compile import as_in_production, own_traces
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.rl.float64 import in_float64
from tests.models.conftest import CHECKPOINTS, load_recorded
from tests.tables import each_row

TOLERANCE = 1e-5  # of the largest number
WITHOUT_ROUNDING = 2e-6  # that of transformers' and our tables, of rope for one, is left
ROUNDING = float(np.finfo(np.float32).eps)  # of the norm of all gradients
# Gradients whose distance from those in float64 may exceed 1e-5, up to as many times the distance of transformers' own
# in float32, which is recorded with them: float32 has no more digits of these (docs/reinforcement_learning.md), and
# ours have those of transformers where both are computed in float64.
TIMES = {"bailing_hybrid": 1.5, "bamba": 2, "lara_mini": 0.5, "gemma4": 1.5, "zamba": 0.5, "zamba2": 1, "axk2": 1.5}
TIMES |= {"diffllama": 0.6, "dots3_note": 2, "hy_v4": 2, "granite_hybrid": 3, "dory": 2, "llama": 2.5}
TIMES |= {"falcon_mamba": 2.5, "kimi_linear": 2, "olmo_hybrid": 2}
# Of logits. transformers' own of mamba2 are 2.7e-5 from those in float64, ours 6e-6. zamba2: as its gradients.
OF_LOGITS = {"mamba2": 5e-5, "zamba2": 1e-4}
# Dense, windows, experts, latent attention, states, keys of other layers: all whose gradients are recorded.
RECORDED = sorted(path.parent.name for path in CHECKPOINTS.glob("*/gradients.npz"))


def packed(case: SimpleNamespace) -> SimpleNamespace:
    """Two rows with both prompts twice, and with the first one and padding; `last`: where the last prompt is."""
    long, short = case.prompts
    parts = (short, long, short, long)
    tokens, segments = np.zeros((2, sum(map(len, parts))), np.int32), np.full((2, sum(map(len, parts))), -1, np.int32)
    tokens[0], segments[0] = np.concatenate(parts), np.repeat((3, 0, 7, 1), [len(part) for part in parts])
    tokens[1, : len(long)], segments[1, : len(long)] = long, 5
    return SimpleNamespace(tokens=tokens, segments=segments, last=slice(-len(long), None))


def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token after the ones before it; logits [T, V]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], 1).mean()


def loss_of_last(params: nnx.State, case: SimpleNamespace, rows: SimpleNamespace, **options: Any):
    """The loss of the last prompt of the first row, and all logits."""
    logits = forward(case.model, params, rows.tokens, rows.segments, **options)
    return loss(logits[0, rows.last], jnp.asarray(rows.tokens[0, rows.last])), logits


def recorded_gradients(name: str, model: Any, folder: Any) -> tuple[nnx.State, float, float, float]:
    """Weights of the model's structure that hold transformers' gradients, NaN where none is recorded; the norm of all;
    how far from them gradients of a weight may be, as TIMES says; and how far those of all weights together.
    """
    tensors = {
        key: np.full(values.shape, np.nan, np.float32)
        for path in checkpoint(name).glob("*.safetensors")
        for key, values in load_file(path).items()
    }
    with np.load(CHECKPOINTS / name / "gradients.npz", allow_pickle=False) as found:
        ends = np.cumsum(found["counts"])[:-1]
        for key, places, values in zip(
            found["names"].tolist(), np.split(found["places"], ends), np.split(found["values"], ends), strict=True
        ):
            tensors[key].flat[places] = values
        norm = float(found["norm"])
        tolerance = max(TOLERANCE, TIMES[name] * float(found["float32_error"])) if name in TIMES else TOLERANCE
        # As far from float64 as what is TOLERANCE from transformers' own in float32 can be.
        of_all = TOLERANCE + float(found.get("float32_norm_error", 0))
    save_file(tensors, folder / "model.safetensors")
    source = SafetensorsCheckpoint(folder)
    state = load_params(model, source)
    source.close()
    return state, norm, tolerance, of_all


def assert_gradients(
    found: nnx.State, expected: nnx.State, norm: float, tolerance: float, of_all: float
) -> tuple[float, float]:
    """Gradients of each weight are as expected, to `tolerance` of its largest; so is the norm of all; and the norm of
    the differences of all weights that are known is at most `of_all` of the norm of these. Returns the largest
    difference, as a share of the largest gradient of the same weight, and the share of the norms.

    One that is nothing but rounding on both sides (of the last factor of Gemma 4, which the final norm undoes) is so.
    """
    ours = {path: np.asarray(values[...], np.float64) for path, values in nnx.to_flat_state(found)}
    theirs = {path: np.asarray(values[...]) for path, values in nnx.to_flat_state(expected)}
    known, worst, squares = 0, 0.0, np.zeros(2)
    for path, values in ours.items():
        compared = np.isfinite(theirs[path])
        known += int(compared.sum())
        bound = tolerance * np.abs(values).max() + 1e-9 * norm
        if max(np.abs(values).max(), np.abs(theirs[path])[compared].max(initial=0)) <= ROUNDING * norm:
            bound = 2 * ROUNDING * norm
        difference = np.abs(values - theirs[path])[compared].max(initial=0)
        assert difference <= bound, path
        squares += [np.sum(each[compared] ** 2) for each in (values - theirs[path], theirs[path])]
        if np.abs(values).max() > ROUNDING * norm:
            worst = max(worst, difference / np.abs(values).max())
    assert known > 100
    assert abs(sum(np.sum(values**2) for values in ours.values()) ** 0.5 - norm) <= tolerance * norm
    distance = float(np.sqrt(squares[0] / squares[1]))
    assert distance <= of_all
    return float(worst), distance


# Windows and soft caps, sinks and experts, latents and groups of experts, scans and convolutions. What layers compute
# test_golden.py shows of every family.
KINDS = {"gemma2", "gpt_oss", "deepseek_v3", "falcon_h1", "lfm2"}
FURTHER = pytest.mark.thorough("a further family of a kind")


def test_every_architecture_that_transformers_has_is_recorded():
    """Those that see have the text layers of others. The classes of MiniCPM, InternLM, Ling, Baichuan, DeepSeekMoE,
    DeciLM, Orion, Solar Pro, the first Qwen, Falcon's and StableLM's first form, dots.ocr, DeepSeek-OCR, PLaMo 3,
    openPangu, TeleChat, Tele-FLM, Nanbeige, Ouro, Rnj, Jais, AliceAI, Param, MiMo, MiMo-V2.5, Phi-3-vision and Step
    come with their checkpoints. The classes of Mistral 4, DeepSeek-VL2, Molmo, GLM-4V and Phi-4-multimodal see,
    and that of Llama 3.2 Vision's text part does what Llama does. The numbers of Apertus's activation are no weights
    here. Blocks of keys that have one key for several tokens need pages.
    """
    assert set(RECORDED) >= KINDS
    found = {json.loads((CHECKPOINTS / name / "config.json").read_text())["architectures"][0] for name in RECORDED}
    texts = {name for name in MODELS if name.endswith(("ForCausalLM", "LMHeadModel"))}
    assert texts - found == {
        *("MiniCPMForCausalLM", "MiniCPM3ForCausalLM", "InternLM3ForCausalLM", "BailingMoeV2ForCausalLM"),
        *("BaichuanForCausalLM", "DeepseekForCausalLM", "InternLM2ForCausalLM", "QWenLMHeadModel"),
        *("Mistral4ForCausalLM", "ApertusForCausalLM", "DeepseekVLV2ForCausalLM"),
        *("MolmoForCausalLM", "GLM4VForCausalLM"),
        *(
            "Phi4MultimodalForCausalLM",
            "MiMoV2ForCausalLM",
            "SolarForCausalLM",
            "Phi3VForCausalLM",
        ),
        *("DeepseekV4ForCausalLM", "DotsOCRForCausalLM", "InternLMForCausalLM", "RWForCausalLM"),
        *("DeepseekV41ForCausalLM", "Qwen4ExpForCausalLM"),
        *("DeepseekOCRForCausalLM", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "Param2MoEForCausalLM"),
        *("PanguUltraMoEForCausalLM", "Plamo3ForCausalLM", "Step3TextForCausalLM", "TeleChat2ForCausalLM"),
        *("TeleFLMForCausalLM", "MllamaForCausalLM", "NanbeigeForCausalLM", "OuroForCausalLM", "Rnj1ForCausalLM"),
        "JAISLMHeadModel",
        "AliceAIForCausalLM",
        *(
            "MiMoForCausalLM",
            "DeciLMForCausalLM",
            "BailingMoeForCausalLM",
            "OrionForCausalLM",
            "StableLMEpochForCausalLM",
            "Step3p5ForCausalLM",
        ),
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in KINDS else FURTHER) for name in RECORDED])
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path, pytestconfig, report):
    """Compiled as in production, in whose order sums lose less than in that of programs that nothing optimises."""
    case = load_recorded(name)
    rows = packed(case)
    run = jax.jit(jax.value_and_grad(partial(loss_of_last, case=case, rows=rows), has_aux=True))
    with contextlib.nullcontext() if name in KINDS else as_in_production():
        (_, logits), grads = run(nnx.state(case.model))
    (long, short), logits = case.prompts, np.asarray(logits)
    ends = np.cumsum([len(short), len(long), len(short)])
    found = [*np.split(logits[0], ends), logits[1, : len(long)]]
    for ours, golden in zip(found, (*reversed(case.logits), *reversed(case.logits), case.logits[0]), strict=True):
        assert np.abs(ours - golden).max() <= OF_LOGITS.get(name, TOLERANCE) * np.abs(golden).max()
    worst, distance = assert_gradients(grads, *recorded_gradients(name, case.model, tmp_path))
    if pytestconfig.getoption("--thorough"):
        report(f"gradients of {name}: {distance:.1e} of all from those recorded, {worst:.1e} of a weight's largest")


@pytest.mark.thorough("programs in float64 of what the test above compares in float32")
@pytest.mark.parametrize("name", sorted({*TIMES, "qwen2"}))
def test_without_rounding_gradients_are_those_of_transformers(name, tmp_path):
    case = load_recorded(name)
    run = jax.value_and_grad(partial(loss_of_last, case=case, rows=packed(case)), has_aux=True)
    _, grads = in_float64(run, nnx.state(case.model))
    expected, norm, *_ = recorded_gradients(name, case.model, tmp_path)
    assert_gradients(grads, expected, norm, WITHOUT_ROUNDING, WITHOUT_ROUNDING)


@pytest.mark.parametrize("name", ["gemma2", pytest.param("lfm2", marks=FURTHER)])
def test_layers_computed_again_and_blocks_of_queries_change_nothing(name, monkeypatch):
    case = load_recorded(name)
    rows, params = packed(case), nnx.state(case.model)
    (value, _), grads = jax.jit(jax.value_and_grad(partial(loss_of_last, case=case, rows=rows), has_aux=True))(params)
    monkeypatch.setattr(unpaged, "BLOCK", 32)
    computed_again = jax.checkpoint(partial(loss_of_last, case=case, rows=rows, remat=True))
    with own_traces():
        (other, _), others = jax.jit(jax.value_and_grad(computed_again, has_aux=True))(params)
    np.testing.assert_allclose(value, other, rtol=1e-6)
    for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        assert np.abs(one - two).max() <= TOLERANCE * max(np.abs(one).max(), 1e-3)


def test_layers_computed_again_keep_less():
    case = load_recorded("llama")
    rows = packed(case)

    def kept(remat: bool) -> int:
        """Numbers that the backward pass is given."""
        _, backward = jax.eval_shape(
            lambda params: jax.vjp(lambda each: loss_of_last(each, case, rows, remat=remat)[0], params),
            nnx.state(case.model),
        )
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert kept(True) < 0.5 * kept(False)


def test_positions_are_those_of_each_segment():
    case = load_recorded("llama")
    rows, params = packed(case), nnx.state(case.model)
    own = np.concatenate([np.arange(len(case.prompts[index])) for index in (1, 0, 1, 0)])
    rest = np.concatenate([np.arange(len(case.prompts[0])), np.arange(len(own) - len(case.prompts[0]))])
    alone = forward(case.model, params, rows.tokens, rows.segments)
    given = forward(case.model, params, rows.tokens, rows.segments, np.stack([own, rest]))
    assert (np.asarray(alone) == np.asarray(given)).all()
    moved = forward(case.model, params, rows.tokens, rows.segments, np.stack([own * 2, rest]))
    assert not np.allclose(moved[0], alone[0]) and (np.asarray(moved[1]) == np.asarray(alone[1])).all()


def test_weights_are_those_that_are_given():
    case = load_recorded("llama")
    params, abstract = nnx.state(case.model), build_model(case.config, Build("float32"))
    tokens = case.prompts[1][None]
    assert (np.asarray(forward(abstract, params, tokens)) == np.asarray(forward(case.model, params, tokens))).all()
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert not np.asarray(forward(case.model, zeros, tokens)).any()


def test_bfloat16_is_close():
    case = load_recorded("gpt_oss")
    model = build_model(case.config, Build("bfloat16"))
    source = SafetensorsCheckpoint(checkpoint("gpt_oss"))
    logits = np.asarray(forward(model, load_params(model, source), case.prompts[1][None]))[0]
    source.close()
    assert logits.dtype == np.float32
    assert np.abs(logits - case.logits[1]).max() <= 0.1 * np.abs(case.logits[1]).max()


BUILDS = {
    "pooling model": ({"pooler": Pooler()}, {}, "pooling model, which has no logits"),
    "stage": ({}, {"stage": Stage(0, 1, is_last=False)}, "layers 0 to 0 of"),
    "mesh": ({}, {"mesh": MeshLayout(model=2)}, "build it for one device"),
    "int8": ({"quantization": rounded("int8")}, {}, "take a checkpoint of plain weights"),
}


@each_row("kind", BUILDS)
def test_what_has_no_such_forward_pass_is_refused(kind):
    changes, options, text = BUILDS[kind]
    model = build_model(replace(load_recorded("llama").config, **changes), Build("float32", **options))
    with pytest.raises(ValueError, match=f"LlamaForCausalLM cannot be run over whole sequences: .*{text}"):
        forward(model, nnx.state(model), np.zeros((1, 4), np.int32))


def test_tokens_with_several_hidden_states_have_none_between_layers():
    model = build_model(read_folder(CHECKPOINTS / "dory"), Build("float32"))
    with pytest.raises(ValueError, match="needs one hidden state per token .*: a token of DoryForCausalLM has 2"):
        hidden_states(model, nnx.state(model), np.zeros((1, 4), np.int32))


TOKENS = np.zeros((2, 4), np.int32)
ARGUMENTS = {
    "tokens of one row": ({"tokens": TOKENS[0]}, r"tokens must be integers \[B, T\] .*, got int32\[4\]"),
    "no tokens": ({"tokens": TOKENS[:, :0]}, r"tokens must be integers \[B, T\] .*, got int32\[2, 0\]"),
    "probabilities": ({"tokens": TOKENS * 0.5}, r"tokens must be integers .*, got float"),
    "segments of others": ({"segment_ids": TOKENS[:1]}, r"segment_ids must be integers \[2, 4\], got int32\[1, 4\]"),
    "positions of others": ({"positions": TOKENS[:, 1:]}, r"positions must be integers \[2, 4\], got int32\[2, 3\]"),
    "no params": ({"params": {}}, "params must be an nnx.State .*, got dict with 0 leaves"),
    "an id too many": ({"tokens": TOKENS + 128}, "tokens must be at least 0 and below 128, got 128"),
    "an id too few": ({"tokens": jnp.asarray(TOKENS - 1)}, "tokens must be at least 0 and below 128, got -1"),
    "an id that int32 wraps": (
        {"tokens": TOKENS.astype(np.int64) + 2**32},
        "tokens must be at least 0 and below 128, got 4294967296",
    ),
    "an id of uint64": (
        {"tokens": TOKENS.astype(np.uint64) + 2**63},
        "tokens must be .* below 128, got 9223372036854775808",
    ),
    "texts": ({"tokens": np.array([["a"]])}, "tokens must be integers"),
    "segments that int32 wraps": (
        {"segment_ids": TOKENS.astype(np.int64) + 2**32},
        "segment_ids must be .*, got 4294967296",
    ),
    "a position before the first": ({"positions": TOKENS - 1}, "positions must be at least 0 and .*, got -1"),
}
LEARNED = {
    "a position too many": ({"positions": TOKENS + 64}, "positions must be at least 0 and below 64, got 64"),
    "a row too long": ({"tokens": np.zeros((1, 65), np.int32)}, "positions must be at least 0 and below 64, got 64"),
}


@each_row("kind", ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(kind):
    changes, text = ARGUMENTS[kind]
    model = load_recorded("llama").model
    with pytest.raises(ValueError, match=text):
        forward(**{"model": model, "params": nnx.state(model), "tokens": TOKENS} | changes)


def test_learned_positions_are_those_of_the_model():
    model = load_recorded("gpt2").model
    for changes, text in LEARNED.values():
        with pytest.raises(ValueError, match=text):
            forward(**{"model": model, "params": nnx.state(model), "tokens": TOKENS} | changes)


def test_experts_and_weights_that_the_model_does_not_have_are_refused():
    model = load_recorded("mixtral").model
    params, tokens = nnx.state(model), TOKENS[:1]
    count = model.config.experts.num_experts
    with pytest.raises(ValueError, match=f"routed_experts must be .* below {count}, got {count}"):
        forward(model, params, tokens, routed_experts=np.full((1, 4, 2, 2), count))
    for make in (lambda leaf: leaf[..., :1], lambda leaf: leaf.astype(jnp.int32)):
        with pytest.raises(ValueError, match=r"params\[.* must be float32\[.*, or of another float dtype, got"):
            forward(model, jax.tree.map(make, params), tokens)


def test_numbers_that_only_the_device_knows_give_nan():
    model = load_recorded("llama").model
    params = nnx.state(model)
    tokens = np.array([[5, 6, 7, 8, 500], [5, 200, 7, 8, -9]], np.int32)
    segments = np.array([[0, 0, 0, 0, -1], [0, 0, 1, 1, -1]], np.int32)
    found = jax.jit(lambda *given: log_probs(model, params, *given))(tokens, segments)
    whole = log_probs(model, params, np.where((tokens < 0) | (tokens > 127), 0, tokens), segments)
    assert np.argwhere(np.isnan(found)).tolist() == [[1, 1]]
    np.testing.assert_array_equal(found[0], whole[0])
    np.testing.assert_array_equal(found[1, 2:], whole[1, 2:])


def test_explicit_mesh_axes_are_refused():
    model = load_recorded("llama").model
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for changes in ({"params": jax.device_put(nnx.state(model), whole)}, {"tokens": jax.device_put(TOKENS, whole)}):
        (name,) = changes
        with pytest.raises(ValueError, match=f"{name} must be split over automatic mesh axes .*, got explicit .*fsdp"):
            forward(**{"model": model, "params": nnx.state(model), "tokens": TOKENS} | changes)
