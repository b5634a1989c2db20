"""Models that see, run as an engine would: pictures to a tower, its rows into a prompt, and steps over pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.checkpoint.stored_head import with_stored_head
from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.registry import processor_for
from jaxengine.models.build import Build
from jaxengine.models.cache import Cache, StateRows, pool_spec, state_rows
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.pictures import Pictures
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.mistral import under_transformers_names
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_cases import FPS, Prompt
from tests.fixtures.picture_checkpoints import frames, golden_path, picture, whole_checkpoint

PAGE_SIZE = 8


def load(name: str, folder: Path) -> SimpleNamespace:
    """A recorded model: config, model (loaded, float32), processor, tokenizer, and what transformers makes of it."""
    folder = whole_checkpoint(name, folder)
    raw = read_config_json(folder)
    source = under_transformers_names(SafetensorsCheckpoint(folder), read_folder(folder, raw))
    config = with_stored_head(read_folder(folder, raw), raw, source)
    model = build_model(config, Build("float32"))
    nnx.update(model, load_params(model, source))
    source.close()
    tokenizer = Tokenizer.from_hf_folder(folder)
    processor = processor_for(folder, raw, config, tokenizer)
    with np.load(golden_path(name), allow_pickle=False) as golden:
        goldens = dict(golden)
    about = {"folder": folder, "config": config, "tokenizer": tokenizer, "goldens": goldens}
    return SimpleNamespace(name=name, model=model, processor=processor, **about)


def video(seed: int, count: int, height: int, width: int, fps: float | None = FPS) -> SimpleNamespace:
    """What jaxengine.media.decoding.videos.Video has: all frames of a source."""
    shown = None if fps is None else np.arange(count) / fps
    held = frames(seed, count, height, width)
    return SimpleNamespace(
        frames=held, frames_indices=np.arange(count), timestamps=shown, fps=fps, total_num_frames=count
    )


def prepared(case: Any, prompt: Prompt) -> tuple[Expanded, dict[str, list[Processed]]]:
    """A prompt of picture_cases with its items."""
    text, items = "", {"image": [], "video": []}
    for part in prompt:
        if isinstance(part, str):
            text += part
            continue
        kind, *about = part
        value = picture(*about) if kind == "image" else video(*about)
        items[kind].append(case.processor.process(kind, value, {}))
        text += case.processor.placeholder(kind)
    ids = case.tokenizer.encode(text)
    encode = getattr(case.processor, "encode", None)  # of families whose placeholders are no tokens
    return case.processor.expand(ids if encode is None else encode(text, ids), items), items


def packed(config: Any, items: list[Processed], *, align: int = 1) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Items one after the other as a tower takes them, each from a multiple of `align` patches on: patches, columns and
    where each begins."""
    tower, starts, end = config.tower, [], 0
    for item in items:
        starts.append(-(-end // align) * align)
        end = starts[-1] + len(item.patches)
    size = -(-end // tower.unit) * tower.unit
    patches = np.zeros((size, tower.num_features), np.float32)
    columns = np.full((len(tower.columns), size), -1, np.int32)
    segments = 0
    for start, item in zip(starts, items, strict=True):
        span = slice(start, start + len(item.patches))
        patches[span], columns[:, span] = item.patches, item.columns
        if "segment" in tower.columns:
            row = tower.columns.index("segment")
            own = columns[row, span]
            own[own >= 0] += segments
            segments = int(own.max()) + 1
    return patches, columns, starts


@jax.jit
def _tower(model: nnx.Module, patches: jax.Array, columns: jax.Array) -> jax.Array:
    return model(patches, columns)


def see(case: Any, items: list[Processed], **options: Any) -> list[np.ndarray]:
    """The embeddings of each item, [num_rows, E], all made in one call."""
    patches, columns, starts = packed(case.config, items, **options)
    rows = np.asarray(_tower(case.model.tower, patches, columns))
    merge, seen = case.config.tower.merge, []
    for start, item in zip(starts, items, strict=True):
        own = np.zeros((item.num_rows, rows.shape[1]), rows.dtype)
        kept = item.rows >= 0
        own[item.rows[kept]] = rows[start // merge : start // merge + len(item.rows)][kept]
        seen.append(own)
    return seen


class Run:
    """One prompt and what follows it."""

    def __init__(self, case: Any, prompt: Prompt, *, bucket: int | None = None):
        self.case = case
        self.expanded, self.items = prepared(case, prompt)
        # Most prompts have one size, so that they share a program.
        self.bucket = bucket or -(-len(self.expanded.token_ids) // 64) * 64
        groups = case.model.cache_groups(PAGE_SIZE, "float32", hybrid=False)
        self.kv = alloc(pool_spec(groups, self.bucket // PAGE_SIZE + 2))
        if states := state_rows(groups, 1):
            self.kv = Cache(self.kv, states)
        self.length = 0

    def prompt(self) -> np.ndarray:
        """Logits of all tokens of the prompt, f32[T, V]."""
        token_ids, index, chosen = self.expanded.token_ids, np.full(len(self.expanded.token_ids), -1, np.int32), []
        order = [self.items[modality][number] for modality, number in self.expanded.order]
        for positions, rows in zip(self.expanded.positions, see(self.case, order) if order else [], strict=True):
            index[positions] = sum(map(len, chosen)) + np.arange(len(positions))
            chosen.append(rows)
        # As many rows for every step, so that all share a program.
        rows = np.zeros((self.bucket, self.case.config.hidden_size * self.case.config.tower.num_parts), np.float32)
        rows[: sum(map(len, chosen))] = np.concatenate([*chosen, rows[:0]])
        return self._step(token_ids, Pictures(rows, index), self.expanded.rope_positions)

    def token(self, token_id: int) -> np.ndarray:
        """Logits behind one more token, f32[V]."""
        place = np.full((3, 1), self.length + self.expanded.rope_delta, np.int32)
        width = self.case.config.hidden_size * self.case.config.tower.num_parts
        nothing = Pictures(np.full((self.bucket, width), np.nan, np.float32), np.full(1, -1, np.int32))
        return self._step([token_id], nothing, None if self.expanded.rope_positions is None else place)[0]

    def _step(self, token_ids: list[int], pictures: Pictures, places: np.ndarray | None) -> np.ndarray:
        count, width = len(token_ids), self.bucket
        missing = width - count
        where = np.arange(self.length, self.length + count, dtype=np.int32)
        slots = np.full(width, -1, np.int32)
        slots[:count] = where
        self.length += count
        pages = np.arange(width // PAGE_SIZE + 2, dtype=np.int32)[None]
        cu, lens = np.asarray([0, count], np.int32), np.asarray([self.length], np.int32)
        ragged = RaggedBatch(cu, lens, pages, slots, np.int32(1), np.int32(count == 1))
        reads, one = np.asarray([0 if self.length > count else -1], np.int32), np.zeros(1, np.int32)
        states = StateRows(cu, reads, one, one + 1, np.int32(1), np.int32(count == 1))
        sections: dict[str, Any] = {"states": states}
        if places is not None:
            sections["mrope_positions"] = np.pad(places, ((0, 0), (0, missing)))
        pictures = replace(pictures, index=np.pad(pictures.index, (0, missing), constant_values=-1))
        ids, positions = (np.pad(np.asarray(each, np.int32), (0, missing)) for each in (token_ids, where))
        batch = ForwardBatch(ids, positions, cu[1:] - 1, (ragged,), sections | {"pictures": pictures})
        logits, self.kv = _forward(self.case.model, jax.tree.map(jnp.asarray, batch), self.kv)
        return np.asarray(logits)[:count]  # as jax compiles a program for the bounds of each slice


@jax.jit
def _forward(model: Any, batch: ForwardBatch, kv: Any) -> tuple[jax.Array, Any]:
    hidden, kv = model(batch, kv)
    return model.logits(hidden), kv
