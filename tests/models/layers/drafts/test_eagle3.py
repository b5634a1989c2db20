"""EAGLE-3 heads, and the hidden states that they read, against what tests/fixtures/recorders/eagle3.py recorded."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxengine.models.build import Build
from jaxengine.models.cache import pool_spec
from jaxengine.models.config.drafts.eagle3 import head_fields
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.base.section import Capture
from jaxengine.models.layers.drafts.eagle3 import Eagle3Source
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_eagle3, read_eagle3
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw_all

LAYERS = "eagle_aux_hidden_state_layer_ids"
PAGE_SIZE, NUM_PAGES, TOLERANCE = 4, 12, 1e-4


def read(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """A recorded head's config.json, and its tensors."""
    about = json.loads((FOLDER / name / "eagle3.json").read_text())
    with np.load(FOLDER / name / "eagle3.npz") as golden:
        d2t = golden["d2t"]
    return about["config"], draw_all(about["shapes"]) | {"d2t": d2t}


def write(folder, raw: dict, tensors: dict[str, np.ndarray]):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def one_sequence(tokens: jax.Array, start: jax.Array) -> ForwardBatch:
    """Tokens i32[T] of one sequence from a position on, whose pages are in no order."""
    count = tokens.shape[0]
    positions = start + jnp.arange(count, dtype=jnp.int32)
    table = jnp.arange(NUM_PAGES, dtype=jnp.int32)[None, ::-1]
    slots = table[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    ends, one = jnp.array([0, count], jnp.int32), jnp.int32(1)
    ragged = RaggedBatch(ends, (start + count)[None], table, slots, one, one * (count == 1))
    return ForwardBatch(tokens, positions, ends[1:] - 1, (ragged,))


def pool_of(model):
    return alloc(pool_spec(model.cache_groups(PAGE_SIZE, "float32", hybrid=False), NUM_PAGES))


_OTHERS = [pytest.param(name, marks=pytest.mark.thorough("another configuration")) for name in ("llama", "qwen3")]


@pytest.mark.parametrize("name", ["qwen3_bias", *_OTHERS])
def test_logits_are_those_of_the_definition(name, recorded, tmp_path):
    model, config = recorded(name).model, recorded(name).config
    raw, tensors = read(name)
    # Most checkpoints have a copy of the model's embeddings, and which tokens have drafts.
    lender = SafetensorsCheckpoint(checkpoint(name))
    copies = {"t2d": np.zeros(config.vocab_size, np.bool_)}
    if "embed_tokens.weight" not in tensors:
        copies["embed_tokens.weight"] = lender.read("model.embed_tokens.weight")
    folder = write(tmp_path, raw, tensors | copies)
    shape = read_eagle3(folder, config)
    source = Eagle3Source(SafetensorsCheckpoint(folder), shape, lender)
    assert source.config == shape and shape.own_embedding == (shape.hidden_size != config.hidden_size)
    head = build_eagle3(shape, Build("float32"))
    nnx.update(head, load_params(head, source))
    source.close()
    lender.close()
    graph, state = nnx.split(head)

    with np.load(FOLDER / name / "eagle3.npz") as golden:
        tokens, wanted, logits, further = (golden[key] for key in ("token_ids", "streams", "logits", "further"))
        ids = np.arange(len(golden["d2t"])) + golden["d2t"]

    def check(found, wanted):
        assert np.abs(np.asarray(found) - wanted).max() <= TOLERANCE * np.abs(wanted).max()

    def check_logits(found, wanted):
        found = np.asarray(found)
        assert np.isneginf(np.delete(found, ids, axis=1)).all()
        check(found[:, ids], wanted)

    target_graph, target_state = nnx.split(model)

    @jax.jit
    def streams(state, kv):
        target = nnx.merge(target_graph, state)
        batch, capture = one_sequence(jnp.asarray(tokens), jnp.int32(0)), Capture(shape.streams)
        target(batch._replace(sections={"capture": capture}), kv)
        return capture.joined()

    check(streams(target_state, pool_of(model)), wanted)

    @jax.jit
    def run(state, kv, hidden, tokens, start, lent):
        head = nnx.merge(graph, state)
        hidden = head.read(hidden) if hidden.shape[1] == wanted.shape[1] else hidden
        lender = nnx.merge(target_graph, lent)
        hidden, kv = head(one_sequence(tokens, start), kv, hidden, head.embeddings(tokens, lender))
        return hidden, head.draft_logits(hidden, lender), kv

    count = len(logits)
    kv = pool_of(head)
    for first, last in ((0, 7), (7, count)):
        part = wanted[first:last], tokens[first + 1 : last + 1], jnp.int32(first)
        out, found, kv = run(state, kv, *part, target_state)
        check_logits(found, logits[first:last])
    _, found, _ = run(state, kv, out[-1:], tokens[count + 1 : count + 2], jnp.int32(count), target_state)
    check_logits(found, further)


@pytest.mark.parametrize(
    ("listed", "streams"),
    [
        ({}, (2, 16, 29)),
        ({LAYERS: [2, 16, 29]}, (2, 16, 29)),
        ({"eagle_config": {LAYERS: [1, 15, 28], "use_aux_hidden_state": True}}, (2, 16, 29)),
        ({"eagle_config": {LAYERS: []}}, (2, 16, 29)),
    ],
)
def test_layers_are_those_that_the_configuration_means(listed, streams, recorded, tmp_path):
    raw, _ = read("llama")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "eagle_config"} | listed))
    config = recorded("llama").config
    deep = type(config)(**{**vars(config), "attention": config.attention[:1] * 32})
    assert read_eagle3(tmp_path, deep).streams == streams


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "for an EAGLE-3 head, got MistralForCausalLM"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "Eagle3Qwen3ForCausalLM for an EAGLE-3 head, got EagleLlama"),
        ({"speculators_model_type": "dflash"}, 'speculators_model_type must be "eagle3"'),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "mistral"}},
            "model_type must be one of llama, qwen3 for an EAGLE-3 head",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1 for an EAGLE-3 head"),
        ({"logit_scale": 0.5}, "logit_scale must be 1.0 or absent"),
        ({"sliding_window": 8}, "sliding_window must be absent"),
        (
            {
                "architectures": ["Eagle3Qwen3ForCausalLM"],
                "layer_types": ["sliding_attention"],
                "sliding_window": 8,
                "use_sliding_window": True,
            },
            "sliding_window must be absent, or not used, for an EAGLE-3 head",
        ),
        ({"quantization_config": {}}, "quantization_config must be absent"),
        ({"draft_vocab_size": 129}, "draft_vocab_size must be at most vocab_size, 128"),
        ({LAYERS: [True]}, "must be a list of whole numbers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true or absent"),
    ],
)
def test_other_heads_are_refused(changed, said, recorded, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(read("llama")[0] | changed))
    with pytest.raises(ModelFileError, match=said):
        read_eagle3(tmp_path, recorded("llama").config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d2t: None, "which 48 of 128 tokens the head drafts nobody knows"),
        (lambda d2t: d2t[:-1], "must hold 48 integers"),
        (lambda d2t: d2t.astype(np.float32), "must hold 48 integers"),
        (lambda d2t: d2t * 0 - 1, "must name 48 tokens of 128, each once"),
        (lambda d2t: -np.arange(48), "must name 48 tokens of 128, each once"),
    ],
)
def test_a_head_says_which_tokens_it_drafts(change, said, recorded, tmp_path):
    raw, tensors = read("llama")
    changed = change(tensors.pop("d2t"))
    folder = write(tmp_path, raw, tensors if changed is None else tensors | {"d2t": changed})
    source = SafetensorsCheckpoint(folder)
    with pytest.raises(ModelFileError, match=said):
        Eagle3Source(source, read_eagle3(folder, recorded("llama").config), None)
    source.close()


def test_other_embeddings_are_kept(recorded, tmp_path):
    raw, tensors = read("llama")
    config = recorded("llama").config
    lender = SafetensorsCheckpoint(FOLDER / "llama")
    table = lender.read("model.embed_tokens.weight").copy()
    table[-1, -1] += 1
    folder = write(tmp_path, raw, tensors | {"embed_tokens.weight": table})
    source = Eagle3Source(SafetensorsCheckpoint(folder), read_eagle3(folder, config), lender)
    head = build_eagle3(source.config, Build("float32"))
    nnx.update(head, load_params(head, source))
    np.testing.assert_array_equal(head.embed.weight.values[...], table)
    source.close()
    lender.close()


def test_a_name_says_which_layer_a_head_has():
    raw, _ = read("llama")
    named = ["LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"]
    named += ["Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"]
    layers = dict.fromkeys(named, "Llama") | dict.fromkeys(["Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM"], "Qwen3")
    read_as = {name: head_fields(raw | {"architectures": [name]}).value("architectures") for name in layers}
    assert read_as == {name: [f"{layer}ForCausalLM"] for name, layer in layers.items()}
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": raw | {"model_type": "qwen3"}}
    assert head_fields(nested).value("architectures") == ["Qwen3ForCausalLM"]


def test_fields_of_speculators_are_read_from_both_places():
    raw, _ = read("qwen3")
    fields = head_fields(raw)
    assert fields.integer("hidden_size") == 48 and fields.integer("target_hidden_size") == 64
    with pytest.raises(ModelConfigError, match="transformer_layer_config"):
        head_fields({"speculators_model_type": "eagle3"})
