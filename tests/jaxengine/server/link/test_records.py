"""Records in messages are the same at the other end, and no other class is made there."""

from __future__ import annotations

from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from jaxengine.checkpoint.default_model import GENERATION_DEFAULTS
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.server.link.open_inputs import packed_source
from jaxengine.server.link.records import packed, unpacked

MODELS = Path(__file__).parents[3] / "fixtures" / "models"


def sent(value):
    return unpacked(msgspec.msgpack.decode(msgspec.msgpack.encode(value)))


# Dense, states, compressed caches, several hidden states, a declared family, towers of images (a frozenset) and sounds.
@pytest.mark.parametrize(
    "name", ["llama", "kimi_linear", "deepseek_v4", "gemma3n", "plamo3", "deepseek_ocr_vision", "qwen3_omni"]
)
def test_a_source_is_the_same_at_the_other_end(name):
    config = EngineConfig(model=str(MODELS / name), load_format="dummy", skip_tokenizer_init=True)
    source = open_model(config).without_weights()
    assert sent(packed_source(source)) == replace(source, config=replace(source.config, quantization=None))


def test_the_default_model_keeps_its_sampling_defaults():
    """An API process that is given its path cannot know that nobody named it."""
    source = open_model(EngineConfig(load_format="dummy", skip_tokenizer_init=True))
    assert sent(packed_source(source.without_weights())).generation_defaults == GENERATION_DEFAULTS


class Own(NamedTuple):
    """A plugin's record."""

    sizes: tuple[int, ...]
    named: dict[int, list[float]]
    chosen: frozenset[str]


def test_values_keep_their_types():
    own = Own((1, -(2**63)), {3: [0.5, float("inf")]}, frozenset({"a"}))
    for value in (own, (own, None, b"x", Path("/a/b")), {}, [], (), ["record"], [["path", "x"]], True):
        assert sent(packed(value)) == value
        assert type(sent(packed(value))) is type(value)


def test_what_is_no_record_is_refused():
    with pytest.raises(TypeError, match="object object at .* cannot be part of a record"):
        packed((1, object()))
    with pytest.raises(TypeError, match="Inner is no record"):
        packed(make_dataclass("Inner", [])())
    for module, name in (("os", "system"), ("subprocess", "Popen"), ("jaxengine.server.link.records", "packed")):
        with pytest.raises(TypeError, match=f"{module}.{name} is no record"):
            unpacked(["record", module, name, {}])
