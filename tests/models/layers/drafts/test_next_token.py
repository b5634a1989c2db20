"""Layers that predict the token after the next against what tests/fixtures/recorders/next_token.py recorded."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxengine.models.build import Build
from jaxengine.models.cache import pool_spec
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.registry import build_model, build_next_token, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import is_unread, load_params
from jaxengine.models.weights.views.renamed import NextTokenSource
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from tests.fixtures.drawn_weights import FOLDER, draw, draw_all

PAGE_SIZE, NUM_PAGES, TOLERANCE = 4, 40, 1e-4
OTHER = pytest.mark.thorough("another family")
CASES = sorted(path.parent.name for path in FOLDER.glob("*/next_token.npz"))
OFTEN = ("glm4_moe", "mimo", "mimo_v2_flash", "qwen3_5")


def stored_names(tensors, prefix: str, model):
    """The layer's tensors as checkpoints of the model's family name them, and CheckpointNames.next_layer."""
    layer = model.checkpoint_names.next_layer
    inverse = [(new, old) for old, new in layer.placed(int(prefix.split(".")[2]))]
    found = {
        key: next((old + key.removeprefix(new) for new, old in inverse if key.startswith(new)), key) for key in tensors
    }
    assert not layer.names or all("mtp" in key for key in found.values())
    return {found[key]: value for key, value in tensors.items()}, layer


def test_layers_are_announced_and_quantised_under_the_names_of_their_checkpoints():
    raw, raw_3_5 = (json.loads((FOLDER / name / "config.json").read_text()) for name in ("qwen3_next", "qwen3_5"))
    assert read_hf(raw).num_nextn_predict_layers == 1 and read_hf(raw_3_5).num_nextn_predict_layers == 0
    stored = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["mtp.layers.0.mlp"]}
    config = read_hf(raw_3_5 | {"mtp_num_hidden_layers": 1, "quantization_config": stored})
    head = build_next_token(config, Build("float32"))
    (layer,) = head.layers
    kinds = {
        part: {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(module)) if leaf.ndim > 1}
        for part, module in (("attention", layer.attention), ("mlp", layer.mlp))
    }
    assert "float8_e4m3fn" in kinds["attention"] and kinds["mlp"] == {"float32"}


@pytest.mark.parametrize(
    "name",
    [*OFTEN, *(pytest.param(name, marks=OTHER) for name in CASES if name not in OFTEN)],
)
def test_logits_are_those_of_the_definition(name, recorded, tmp_path):
    model, config = recorded(name).model, recorded(name).config
    prefix = f"model.layers.{config.num_layers}."
    about = json.loads((FOLDER / name / "tensors.json").read_text())
    shapes = json.loads((FOLDER / name / "next_token.json").read_text())
    own = draw_all(shapes, offset_norms=about["offset_norms"])
    # A checkpoint has copies of what the model lends.
    copies = {"embed_tokens.weight": np.ones((config.vocab_size, config.hidden_size), np.float32)}
    copies["shared_head.head.weight"] = copies["embed_tokens.weight"]
    other = {"model.norm.weight": draw("model.norm.weight", (config.hidden_size,))}
    own, layer = stored_names(own, prefix, model)
    # A model without drafts is opened from the same checkpoint.
    alone = replace(config, num_nextn_predict_layers=max(1, config.num_nextn_predict_layers))
    abstract = build_model(alone, Build("float32"))
    assert all(is_unread(abstract, abstract.checkpoint_names.renamed(key)) for key in own)
    save_file(own | other | {prefix + key: value for key, value in copies.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FOLDER / name / "config.json").read_text())
    head = build_next_token(config, Build("float32"))
    source = SafetensorsCheckpoint(tmp_path)
    nnx.update(head, load_params(head, NextTokenSource(source, config.num_layers, layer)))
    source.close()
    graph, state = nnx.split(head)

    @jax.jit
    def run(state, kv, hidden, tokens, start):
        head, count = nnx.merge(graph, state), tokens.shape[0]
        positions = start + jnp.arange(count, dtype=jnp.int32)
        table = jnp.arange(NUM_PAGES, dtype=jnp.int32)[None, ::-1]
        slots = table[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        ends = jnp.array([0, count], jnp.int32)
        one = jnp.int32(1)
        ragged = RaggedBatch(ends, (start + count)[None], table, slots, one, one * (count == 1))
        batch = ForwardBatch(tokens, positions, ends[1:] - 1, (ragged,))
        hidden, kv = head(batch, kv, head.read(hidden), model.embed_tokens(tokens))
        return hidden, head.draft_logits(hidden, model), kv

    with np.load(FOLDER / name / "next_token.npz") as golden:
        tokens, hidden, logits, further = (golden[key] for key in ("token_ids", "hidden", "logits", "further"))
    assert np.abs(model.logits(jnp.asarray(hidden)) - recorded(name).logits[0]).max() < 1e-3

    def check(found, wanted):
        assert np.abs(np.asarray(found) - wanted).max() <= TOLERANCE * np.abs(wanted).max()

    count = len(logits)
    for cuts in ([0, count], [0, 7, count - 7, count]):
        kv = alloc(pool_spec(head.cache_groups(PAGE_SIZE, "float32", hybrid=False), NUM_PAGES))
        for first, last in zip(cuts, cuts[1:], strict=False):
            out, found, kv = run(state, kv, hidden[first:last], tokens[first + 1 : last + 1], jnp.int32(first))
            check(found, logits[first:last])
        _, found, _ = run(state, kv, out[-1:], tokens[count + 1 : count + 2], jnp.int32(count))
        check(found, further)
