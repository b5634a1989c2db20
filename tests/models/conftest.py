"""What the model tests share: recorded checkpoints, and a paged run of a model over ragged steps."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.checkpoint.stored_head import with_stored_head
from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.cache import Cache, StateRows, pool_spec, state_rows
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.pictures import Pictures
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.mistral import under_transformers_names
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from tests.fixtures.drawn_weights import FOLDER as CHECKPOINTS
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.recorded_prompts import WEIGHTS_OF

PAGE_SIZE, PAGES_PER_LAYER, TABLE_WIDTH = 4, 72, 64
NUM_SLOTS = 4  # of states; those of sequences, and what nobody has written, hold NaN before


def load_checkpoint(folder: Path, weights: Path | None = None) -> tuple[ModelConfig, Any]:
    """The configuration in a folder and its model in float32, over the weights there or in another folder."""
    raw = read_config_json(folder)
    source = SafetensorsCheckpoint(weights or folder)
    source = under_transformers_names(source, read_hf(raw))
    config = with_stored_head(read_hf(raw), raw, source)
    config = config.up_to(config.max_position_embeddings)
    model = build_model(config, Build("float32"))
    nnx.update(model, load_params(model, source))
    source.close()
    return config, model


@cache
def load_recorded(name: str) -> SimpleNamespace:
    config, model = load_checkpoint(CHECKPOINTS / name, checkpoint(WEIGHTS_OF.get(name, name)))
    with np.load(CHECKPOINTS / name / "golden.npz", allow_pickle=False) as golden:
        prompts = [golden[f"token_ids_{i}"] for i in range(2)]
        logits = [golden[f"logits_{i}"] for i in range(2)]
    return SimpleNamespace(config=config, model=model, prompts=prompts, logits=logits)


class PagedRun:
    """Feeds sequences to a model step by step, keeping their KV in pages; steps are padded to T tokens, S rows."""

    def __init__(self, model):
        self.graph, state = nnx.split(model)
        self.state, self.num_logits = state, model.config.num_logits
        groups = model.cache_groups(PAGE_SIZE, "float32", hybrid=False)
        self.kv = alloc(pool_spec(groups, PAGES_PER_LAYER))
        if states := state_rows(groups, NUM_SLOTS):
            self.kv = Cache(self.kv, jax.tree.map(lambda rows: jnp.full_like(rows, jnp.nan), states))
        self.slots: dict[str, int] = {}
        self.free = list(np.random.default_rng(0).permutation(PAGES_PER_LAYER))
        self.pages: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    def step(
        self,
        work: dict[str, np.ndarray],
        *,
        num_tokens: int,
        num_seqs: int = 2,
        adapters: dict[str, int] | None = None,
        pictures: Pictures | None = None,
        places: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the new tokens of each sequence; returns their logits f32[n, V] by sequence, of the tokens that have any.

        adapters: slots of some. pictures: of the step's tokens. places: i32[3, T], their M-RoPE positions.
        """
        own = np.full(num_tokens, -1, np.int32)
        tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
        slots, cu = np.full(num_tokens, -1, np.int32), np.zeros(num_seqs + 1, np.int32)
        table, lens = np.full((num_seqs, TABLE_WIDTH), -1, np.int32), np.zeros(num_seqs, np.int32)
        reads, writes = np.full((2, num_seqs), NUM_SLOTS, np.int32)
        end = 0
        for row, (name, new) in enumerate(work.items()):
            writes[row] = self.slots.setdefault(name, len(self.slots))
            reads[row] = writes[row] if name in self.length else -1
            pages, start = self.pages.setdefault(name, []), self.length.get(name, 0)
            self.length[name] = lens[row] = start + len(new)
            while len(pages) * PAGE_SIZE < lens[row]:
                pages.append(self.free.pop())
            table[row, : len(pages)] = pages
            where = np.arange(start, lens[row])
            span = slice(end, end + len(new))
            tokens[span], positions[span] = new, where
            own[span] = (adapters or {}).get(name, -1)
            slots[span] = table[row, where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE
            end = cu[row + 1] = end + len(new)
        cu[len(work) + 1 :] = end
        decodes = len(work) if all(len(new) == 1 for new in work.values()) else 0
        ragged = RaggedBatch(cu, lens, table, slots, np.int32(len(work)), np.int32(decodes))
        nowhere = np.full(num_seqs, NUM_SLOTS, np.int32)
        rows = StateRows(cu, reads, writes, nowhere, np.int32(len(work)), np.int32(decodes))
        sections: dict[str, Any] = {"states": rows}
        sections |= {} if adapters is None else {"adapters": Adapters(own, np.int32(bool(adapters)))}
        sections |= {} if pictures is None else {"pictures": pictures}
        sections |= {} if places is None else {"mrope_positions": places}
        batch = jax.tree.map(jnp.asarray, ForwardBatch(tokens, positions, cu[1:] - 1, (ragged,), sections))
        logits, self.kv = forward(self.graph, self.state, batch, self.kv)
        found = np.asarray(logits)  # first, as jax compiles a program for the bounds of each slice
        return {name: found[cu[row] : cu[row + 1], : self.num_logits] for row, name in enumerate(work)}


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def forward(graph, state, batch, kv):
    model = nnx.merge(graph, state)
    hidden, kv = model(batch, kv)
    return model.logits(hidden), kv


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Folder of the recorded checkpoints."""
    return CHECKPOINTS


@pytest.fixture(scope="session")
def recorded():
    """name -> namespace of config, model (loaded, float32), prompts and golden logits."""
    return load_recorded


@pytest.fixture(scope="session")
def paged_run():
    """The PagedRun class."""
    return PagedRun
