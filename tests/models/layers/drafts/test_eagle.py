"""Heads of EAGLE 1 and 2 against what tests/fixtures/recorders/eagle.py recorded."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.drafts.eagle import head_fields
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.drafts.eagle import EagleSource
from jaxengine.models.registry import build_eagle, read_eagle
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw_all
from tests.models.layers.drafts.test_eagle3 import TOLERANCE, one_sequence, pool_of, write


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_are_those_of_the_definition(name, recorded, tmp_path):
    model, config = recorded(name).model, recorded(name).config
    about = json.loads((FOLDER / name / "eagle.json").read_text())
    # The head of qwen3 has both norms and biases of queries, keys and values, that of llama none of them.
    biases = {"qkv_bias": name == "qwen3"}
    lender = SafetensorsCheckpoint(checkpoint(name))
    copy = {"embed_tokens.weight": lender.read("model.embed_tokens.weight")}
    raw = about["config"] | biases | {"architectures": ["LlamaForCausalLM"]}
    folder = write(tmp_path, raw, draw_all(about["shapes"]) | copy)
    source = EagleSource(SafetensorsCheckpoint(folder), read_eagle(folder, config), lender)
    shape = source.config
    assert (shape.own_embedding, shape.own_head, shape.streams) == (False, False, ())
    assert (shape.first_norm, shape.last_norm, shape.joined_bias) == (
        (True, True, False) if name == "qwen3" else (False, False, True)
    )
    head = build_eagle(shape, Build("float32"))
    nnx.update(head, load_params(head, source))
    source.close()
    lender.close()
    graph, state = nnx.split(head)
    target_graph, target_state = nnx.split(model)

    @jax.jit
    def run(state, kv, hidden, tokens, start, lent):
        head, lender = nnx.merge(graph, state), nnx.merge(target_graph, lent)
        batch = one_sequence(tokens, start)
        hidden, kv = head(batch, kv, head.read(hidden), head.embeddings(tokens, lender))
        return hidden, head.draft_logits(hidden, lender), kv

    with np.load(FOLDER / name / "eagle.npz") as golden:
        tokens, hidden, logits, further = (golden[key] for key in ("token_ids", "hidden", "logits", "further"))

    def check(found, wanted):
        assert np.abs(np.asarray(found) - wanted).max() <= TOLERANCE * np.abs(wanted).max()

    count, kv = len(logits), pool_of(head)
    for first, last in ((0, 7), (7, count)):
        part = hidden[first:last], tokens[first + 1 : last + 1], jnp.int32(first)
        out, found, kv = run(state, kv, *part, target_state)
        check(found, logits[first:last])
    _, found, _ = run(state, kv, out[-1:], tokens[count + 1 : count + 2], jnp.int32(count), target_state)
    check(found, further)


def test_other_heads_are_refused():
    about = json.loads((FOLDER / "llama" / "eagle.json").read_text())["config"]
    for changed, said in (
        ({"architectures": ["EagleCohereForCausalLM"]}, "for an EAGLE head, got EagleCohereForCausalLM"),
        ({"architectures": ["EagleLlamaForCausalLM"], "quantization_config": {}}, "quantization_config"),
        ({"architectures": ["EagleMistralForCausalLM"], "sliding_window": 4096}, "sliding_window"),
        ({"architectures": ["LlamaForCausalLM"], "logit_scale": 2.0}, "logit_scale"),
    ):
        with pytest.raises(ModelConfigError, match=said):
            head_fields(about | changed)
