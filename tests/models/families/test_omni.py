"""Prompts with images, videos and sounds at once, against what transformers makes of them
(tests/fixtures/recorders/omni.py)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxengine.media.base.frames import Video
from jaxengine.media.base.processor import Processed
from jaxengine.media.base.samples import Sound
from jaxengine.media.open import open_processor
from jaxengine.models.build import Build
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures import omni_checkpoints as omni


@pytest.fixture(scope="module", params=omni.CONFIGS)
def case(request, tmp_path_factory):
    return Case(request.param, omni.whole_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


class Case:
    """A checkpoint with its processor and what transformers made of its prompts."""

    def __init__(self, name: str, folder: Any):
        self.name, self.folder = name, folder
        self.config, self.goldens = read_folder(folder), omni.goldens(name)
        self.processor: Any = open_processor(folder, self.config, tokenizer=Tokenizer.from_hf_folder(folder))

    def items(self, prompt: tuple[Any, ...]) -> tuple[str, dict[str, list[Processed]]]:
        text, found = omni.text_and_media(self.name, prompt)
        made = {
            "image": lambda each: each,
            "video": lambda each: Video(each, np.arange(len(each)), None, omni.FPS, len(each)),
            "audio": Sound,
        }
        return text, {
            kind: [self.processor.process(kind, made[kind](each), {}) for each in own] for kind, own in found.items()
        }


@jax.jit
def _tower(model: nnx.Module, patches: jax.Array, columns: jax.Array) -> jax.Array:
    return model(patches, columns)


def test_prompts_and_positions_are_those_of_transformers(case):
    for name, prompt in omni.PROMPTS.items():
        text, items = case.items(prompt)
        expanded = case.processor.expand(case.processor.seeing.tokenizer.encode(text), items)
        np.testing.assert_array_equal(expanded.token_ids, case.goldens[f"{name}_ids"])
        np.testing.assert_array_equal(expanded.rope_positions, case.goldens[f"{name}_places"])
        order = [kind for kind, *_ in (part for part in prompt if not isinstance(part, str))]
        assert [kind for kind, _ in expanded.order] == order
        for positions, (kind, number) in zip(expanded.positions, expanded.order, strict=True):
            assert len(positions) == items[kind][number].num_rows
            token = case.processor.seeing.token_ids[kind]
            assert {expanded.token_ids[place] for place in positions.tolist()} == {token}


@pytest.mark.thorough("a second shape, or what tests/jaxengine/engine/test_omni.py runs", but=["qwen2_5_omni"])
def test_embeddings_are_those_of_transformers(case):
    """Of an image, which fits into one call, and of a sound of several windows."""
    source = SafetensorsCheckpoint(case.folder)
    model: Any = build_model(case.config, Build("float32"))
    nnx.update(model, load_params(model, source))
    source.close()
    # Spectrograms are those of transformers up to rounding.
    for prompt, kind, part, golden, tolerance in (
        ("image", "image", "tower", "image_seen", 1e-5),
        ("long", "audio", "sound_tower", "long_heard", 3e-5),
    ):
        _, items = case.items(omni.PROMPTS[prompt])
        ((item,), tower) = items[kind], getattr(case.config, part)
        missing = -len(item.patches) % tower.unit
        patches = np.pad(item.patches, ((0, missing), (0, 0)))
        columns = np.pad(item.columns, ((0, 0), (0, missing)), constant_values=-1)
        rows = np.asarray(_tower(getattr(model, part), patches, columns))[: len(item.rows)]
        own = np.zeros((item.num_rows, rows.shape[1]), np.float32)
        own[item.rows[item.rows >= 0]] = rows[item.rows >= 0]
        wanted = case.goldens[golden]
        np.testing.assert_allclose(own[::5, : wanted.shape[1]], wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
