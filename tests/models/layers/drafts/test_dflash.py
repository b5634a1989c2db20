"""DFlash heads against what tests/fixtures/recorders/dflash.py recorded."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.drafts.dflash import DFLASH, DSPARK, head_fields
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.drafts.dflash import DFlashSource
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_dflash, read_dflash
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw_all
from tests.models.layers.drafts.test_eagle3 import TOLERANCE, one_sequence, pool_of, write
from tests.tables import each_row

FIRST = 7


def read(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """A recorded head's config.json, and its tensors."""
    about = json.loads((FOLDER / name / "dflash.json").read_text())
    tensors = draw_all(about["shapes"])
    if "lm_head.weight" in tensors:
        with np.load(FOLDER / name / "dflash.npz") as golden:
            tensors["d2t"] = golden["d2t"]
    return about["config"], tensors


def method_of(raw: dict) -> str:
    return DSPARK if "markov_rank" in raw else DFLASH


def loaded(folder, raw: dict, tensors: dict, name: str, config):
    """The head of a folder that is written anew, over a recorded model."""
    source = SafetensorsCheckpoint(write(folder, raw, tensors))
    with_model = SafetensorsCheckpoint(checkpoint(name))
    shape: Any = DFlashSource(source, read_dflash(folder, config, method_of(raw)), with_model)
    head = build_dflash(shape.config, Build("float32"))
    nnx.update(head, load_params(head, shape))
    source.close()
    with_model.close()
    return head


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_bias"])
def test_drafts_are_those_of_the_definition(name, recorded, tmp_path):
    model, config = recorded(name).model, recorded(name).config
    raw, tensors = read(name)
    if name == "qwen3":  # most checkpoints have a copy of the model's embeddings
        source = SafetensorsCheckpoint(checkpoint(name))
        tensors["embed_tokens.weight"] = source.read("model.embed_tokens.weight")
        source.close()
    head = loaded(tmp_path, raw, tensors, name, config)
    assert (head.sizes.own_head, head.sizes.own_embedding) == (name == "qwen3_bias",) * 2
    with np.load(FOLDER / name / "dflash.npz") as golden:
        tokens, streams, wanted = (golden[key] for key in ("token_ids", "streams", "logits"))
        ids = np.arange(len(golden["d2t"])) + golden["d2t"]
    graph, state = nnx.split(head)
    target_graph, target_state = nnx.split(model)

    @jax.jit
    def fill(state, kv, hidden, start):
        return nnx.merge(graph, state).write(one_sequence(jnp.zeros(len(hidden), jnp.int32), start), kv, hidden)

    @jax.jit
    def draft(state, kv, block, start, lent):
        head, lender = nnx.merge(graph, state), nnx.merge(target_graph, lent)
        hidden, kv = head(one_sequence(block, start), kv, head.embeddings(block, lender))
        return head.draft_logits(head.products(hidden, lender), jnp.asarray(tokens[: len(block)]), lender), kv

    count = len(streams)
    block = jnp.asarray([tokens[-1], *[head.sizes.mask_token] * (len(wanted) - 1)], jnp.int32)
    kv = fill(state, pool_of(head), streams[:FIRST], jnp.int32(0))
    _, kv = draft(state, kv, block, jnp.int32(FIRST), target_state)  # what it leaves is overwritten
    kv = fill(state, kv, streams[FIRST:], jnp.int32(FIRST))
    found, _ = draft(state, kv, block, jnp.int32(count), target_state)
    found = np.asarray(found)
    assert np.isneginf(np.delete(found, ids, axis=1)).all()
    assert np.abs(found[:, ids] - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def _raw(**changes) -> dict:
    return read("qwen3")[0] | changes


def _inner(**changes) -> dict:
    raw = read("qwen3")[0]
    return raw | {"dflash_config": raw["dflash_config"] | changes}


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# Fields, and (window, causal) of each of two layers.
RANGES = [
    (_raw(), [(None, False), (None, False)]),
    (_raw(**SLIDING), [(5, True), (None, False)]),
    (_raw(**SLIDING, is_causal=True), [(5, True), (None, True)]),
    (_inner(causal=False) | SLIDING, [(5, False), (None, False)]),
    (_inner(use_swa=True, swa_window_size=6), [(6, False), (6, False)]),
    (_inner(use_swa=True, swa_window_size=6) | {"layer_types": None}, [(6, False), (6, False)]),
    (_inner(use_swa=True) | SLIDING, [(5, True), (None, False)]),
]


@each_row("raw, ranges", RANGES)
def test_layers_see_what_the_configuration_means(recorded, tmp_path, raw, ranges):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    head = read_dflash(tmp_path, recorded("qwen3").config)
    assert [(each.window, each.causal) for each in head.attention] == ranges
    assert all(each.paged for each in head.attention)
    assert (head.streams, head.mask_token, head.from_anchor) == ((1, 2), 127, False)


REFUSED = [
    (_raw(architectures=["DFlash2DraftModel"]), "architectures must be DFlashDraftModel for the method dflash"),
    (_raw(speculators_model_type="eagle3"), 'speculators_model_type must be "dflash"'),
    (_raw(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    (_raw(is_neox_style=False), "is_neox_style must be true"),
    (_raw(dflash_config={}), "mask_token_id must be a token of the vocabulary, 0 to 127"),
    (_inner(mask_token_id=128), "mask_token_id must be a token of the vocabulary, 0 to 127"),
    (_inner(input_embedding_scale=0), "input_embedding_scale must be a finite number > 0"),
    (_inner(final_logit_softcapping=-1), "final_logit_softcapping must be a finite number > 0"),
    (_inner(target_layer_ids=[]), "target_layer_ids must be numbers of layers"),
    (_inner(target_layer_ids=[0, -3]), "target_layer_ids must be a list of whole numbers >= 0"),
    (_inner(target_layer_ids=7), "target_layer_ids must be"),
    (_inner(attention_sink_bias=True), "attention_sink_bias must be false"),
    (_inner(use_aux_hidden_state=False), "use_aux_hidden_state must be true"),
    (_inner(use_swa=True), "sliding_window must be the window"),
    (_raw(layer_types=["full_attention"]), "layer_types must be sliding_attention or full_attention for each layer"),
    (_raw(layer_types=["full_attention", "linear_attention"]), "layer_types must be"),
    (_raw(draft_vocab_size=129), "draft_vocab_size must be at most vocab_size, 128"),
    (_raw(draft_vocab_size="x"), "draft_vocab_size must be an integer"),
]


@each_row("raw, message", REFUSED)
def test_heads_that_are_none_are_refused(recorded, tmp_path, raw, message):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFileError, match=message):
        read_dflash(tmp_path, recorded("qwen3").config)


def test_layers_of_another_model_type_are_refused():
    with pytest.raises(ModelConfigError, match="model_type"):
        raw, _ = read("qwen3_bias")
        head_fields(
            raw | {"transformer_layer_config": raw["transformer_layer_config"] | {"model_type": "llama"}}, DFLASH
        )


def test_scales_are_read_in_either_place(recorded, tmp_path):
    """Muse Glimmer's assistant has its fields at the top, and no vocabulary size."""
    raw = _raw(
        architectures=["MuseGlimmerAssistantModel"], input_embedding_scale=2, **read("qwen3")[0]["dflash_config"]
    )
    raw |= {"dflash_config": {"input_embedding_scale": 3.5, "final_logit_softcapping": 0}, "output_multiplier": 0.5}
    del raw["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    head = read_dflash(tmp_path, recorded("qwen3").config)
    assert (head.embedding_multiplier, head.logit_scale, head.logit_soft_cap) == (3.5, 0.5, None)
    assert (head.vocab_size, head.streams, head.mask_token) == (128, (1, 2), 127)


def test_the_models_matrix_is_shared_without_its_cap(recorded, tmp_path):
    model, config = recorded("gemma2").model, recorded("gemma2").config
    raw = _inner(output_multiplier=0.5, final_logit_softcapping=4.0, target_layer_ids=[0])
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw | sizes | {"layer_types": None}))
    head = build_dflash(read_dflash(tmp_path, config), Build("float32"))
    hidden = jax.random.normal(jax.random.key(0), (3, config.hidden_size))
    found = head.logits_of(head.products(hidden, model), model)
    wanted = 4 * np.tanh(np.asarray(hidden @ model.embed.weight.rows(jnp.arange(config.vocab_size)).T) * 0.5 / 4)
    assert config.logit_soft_cap is not None and np.abs(found - wanted).max() < 1e-5


def test_a_head_over_some_tokens_needs_its_lm_head(recorded, tmp_path):
    raw, tensors = read("qwen3")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"draft_vocab_size": 40}))
    assert read_dflash(tmp_path, recorded("qwen3").config).own_head  # also where no weights are read
    with pytest.raises(ModelFileError, match=r"draft_vocab_size is 40.*lm_head\.weight"):
        loaded(tmp_path, raw | {"draft_vocab_size": 40}, tensors, "qwen3", recorded("qwen3").config)


def test_dspark_heads_are_read(recorded, tmp_path):
    """A file of its authors drafts from the anchor on, one of speculators does if it says so."""
    config, raw = recorded("llama").config, read("llama")[0]

    def written(**changes):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        head = read_dflash(tmp_path, config, DSPARK)
        return head.markov_rank, head.from_anchor, head.mask_token, head.streams

    assert written() == written(sample_from_anchor=None) == (12, True, 4, (1, config.num_layers))
    assert written(dspark_bonus_anchor=True)[1] is False
    earlier = {"mask_token_id": None, "target_layer_ids": None}
    assert written(**earlier, dspark_noise_token_id=9, dspark_target_layer_ids=[0])[2:] == (9, (1,))
    layer = {name: raw[name] for name in raw if name not in ("markov_rank", "mask_token_id", "architectures")}
    ours = {"speculators_model_type": "dspark", "transformer_layer_config": layer, "aux_hidden_state_layer_ids": [1]}
    assert written(**ours)[1:] == (False, 4, (1,)) and written(**ours, sample_from_anchor=True)[1] is True
    for changes, message in (
        ({"markov_rank": None}, "markov_rank"),
        ({"markov_rank": 1 << 30}, "markov_rank must be an integer >= 1 and <= 131072"),
        ({"markov_head_type": "gated"}, 'markov_head_type must be "vanilla"'),
        ({"architectures": ["DFlashDraftModel"]}, "architectures must be Qwen3DSparkModel for the method dspark"),
    ):
        with pytest.raises(ModelFileError, match=message):
            written(**changes)
