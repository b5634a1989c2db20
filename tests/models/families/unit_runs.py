"""Prompts with pictures at the level of models: processed, through the tower, in the places of tokens. No engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.media.registry import processor_class
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.config.tower import BOTH_WAYS
from jaxengine.models.layers.pictures import Pictures
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.unit_pictures import picture, write_checkpoint
from tests.models.conftest import PagedRun, load_recorded

# Few shapes: compiling is what takes time.
PADDED = 130  # tokens of a step


def open_case(name: str, folder: Path) -> SimpleNamespace:
    """A recorded case: its whole checkpoint in `folder`, the loaded model, its processor, and what was recorded."""
    write_checkpoint(folder, name, checkpoint(name))
    case, raw = load_recorded(name), read_config_json(folder)
    tokenizer = Tokenizer.from_hf_folder(folder)
    made = processor_class(case.config.architecture)(folder, raw, case.config, tokenizer)
    with np.load(recorded_path(name)) as recorded:
        rows = dict(recorded)
    return SimpleNamespace(
        name=name, folder=folder, model=case.model, processor=made, tokenizer=tokenizer, recorded=rows
    )


def recorded_path(name: str) -> Path:
    """Path of the file with what transformers makes of a case."""
    return Path(__file__).parents[2] / "fixtures" / "models" / name / "pictures.npz"


def encode(model, items) -> list[np.ndarray]:
    """The embeddings of processed items, each [num_rows, D], out of one call of the tower with padding behind."""
    tower = model.config.tower
    used = sum(len(item.patches) for item in items)
    padding = ((3 if used < 3 * tower.unit else 24) * tower.unit - used, tower.num_features)
    columns = np.concatenate([*(item.columns for item in items), np.full((len(tower.columns), padding[0]), -1)], axis=1)
    patches = np.concatenate([*(item.patches for item in items), np.zeros(padding)])
    found = np.asarray(_run(model.tower, jnp.asarray(patches, jnp.float32), jnp.asarray(columns, jnp.int32)))
    ends = np.cumsum([len(item.patches) for item in items]) // tower.merge
    out = []
    for item, part in zip(items, np.split(found, ends)[:-1], strict=True):
        placed = np.zeros((item.num_rows, found.shape[1]), np.float32)
        placed[item.rows[item.rows >= 0]] = part[item.rows >= 0]
        out.append(placed)
    return out


@nnx.jit
def _run(tower, patches, columns):
    return tower(patches, columns)


def run_prompt(
    case, text: str, pictures: tuple[int, ...], more: np.ndarray, *videos: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """The expanded prompt, and the logits of it and of the tokens `more` behind it."""
    among = getattr(case.processor, "among", lambda options, _: options)
    options = among({}, {"image": len(pictures)})
    made = {"image": [case.processor.process("image", picture(index), options) for index in pictures]}
    made["video"] = [case.processor.process("video", frames, {}) for frames in videos]
    expanded = case.processor.expand(case.tokenizer.encode(text, add_special_tokens=False), made)
    items = [made[modality][number] for modality, number in expanded.order]
    index = np.full(PADDED, -1, np.int32)
    tower = case.model.config.tower
    if items and tower.whole_prompt:
        index[: len(expanded.token_ids)] = BOTH_WAYS
    if expanded.joint is not None:
        index[expanded.joint] = BOTH_WAYS
    rows = np.zeros((PADDED, case.model.config.hidden_size * tower.num_parts), np.float32)  # as many as any prompt has
    first = 0
    for places, found in zip(expanded.positions, encode(case.model, items) if items else [], strict=True):
        index[places] = np.arange(first, first + len(places))
        rows[first : first + len(places)] = found
        first += len(places)
    known = np.asarray([*expanded.token_ids, *more], np.int32)
    pictures = Pictures(jnp.asarray(rows), jnp.asarray(index), tower.part_layers, tower.adds)
    places = None
    if expanded.rope_positions is not None:
        behind = np.arange(len(expanded.token_ids), PADDED, dtype=np.int32) + expanded.rope_delta
        places = np.concatenate([expanded.rope_positions, np.tile(behind, (3, 1))], axis=1)
    run = PagedRun(case.model)
    return expanded.token_ids, run.step({"a": known}, num_tokens=PADDED, pictures=pictures, places=places)["a"]
