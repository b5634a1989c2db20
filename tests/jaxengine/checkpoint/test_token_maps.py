"""Maps of tokens that a memory of n-grams hashes, from the tokenizer of a checkpoint that does not store them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from jaxengine.checkpoint.model_source import with_token_maps
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder
from jaxengine.models.weights.formats.arrays import ArraySource
from tests.fixtures.drawn_weights import FOLDER

TEXTS = ["The", " the", "THE", "th\u00e9", " ", "\n\t", "  ", "x", "\uff58", ""]
FOLDED = [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]


def test_from_the_tokenizer(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(TEXTS)}, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = read_folder(FOLDER / "deepseek_v41")
    fitting = replace(model, ngrams=replace(model.ngrams, vocab_size=4))
    source = ArraySource({"norm.weight": np.ones(3, np.float32)})
    view, names = with_token_maps(source, tmp_path, fitting), ["layers.1.engram.token_map", "layers.4.engram.token_map"]
    assert [*view.names()] == ["norm.weight", *(f"model.{name}" for name in names)] and view.shape("norm.weight") == (
        3,
    )
    for name in names:
        assert view.read(f"model.{name}", slice(0, 10)).tolist() == FOLDED
        assert view.shape(f"model.{name}") == (model.vocab_size,)
    with pytest.raises(ModelFileError, match="engram_compressed_vocab_size = 90 and at most 128 tokens, got 4 and 10"):
        with_token_maps(source, tmp_path, model)
    stored = ArraySource({"layers.1.engram.token_map": np.zeros(128, np.int32)})
    assert with_token_maps(stored, tmp_path, model) is stored  # and so where no layer has such a memory
    assert with_token_maps(source, tmp_path, replace(model, ngrams=None)) is source
    with pytest.raises(ModelFileError, match="tokenizer"):
        with_token_maps(source, tmp_path / "none", fitting)
