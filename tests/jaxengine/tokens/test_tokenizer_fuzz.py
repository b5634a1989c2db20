"""Damaged tokenizer folders: read or refused with a ModelFileError, never a panic, a hang, or all of the memory."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxengine.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
RECORDED = json.loads((ROOT / "tests" / "fixtures" / "tokenizer_ids.json").read_text())
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "added_tokens_decoder": {"600": {"content": "<more>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}


def test_damaged_folders(tmp_path, thorough):
    pieces = RECORDED["sentencepiece"]
    values = {
        "model": "llama",
        "tokens": pieces["tokens"],
        "scores": np.array(pieces["scores"], np.float32),
        "token_type": np.array(pieces["token_type"], np.int32),
    }
    original = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    (tmp_path / "tokenizer.json").write_text(original.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<unk>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    count = 10_000 if thorough else 200
    found = fuzzed(tmp_path, count)
    # Both kinds are there: damage that matters, and damage that does not.
    assert found["refused"] > count // 4 and found["read"] > count // 20


@pytest.mark.parametrize("kind", ["pieces", "ranks"])
def test_damaged_vocabularies(tmp_path, thorough, kind):
    vocabularies = json.loads((ROOT / "tests" / "fixtures" / "vocabularies.json").read_text())
    if kind == "pieces":
        model = vocabularies["sentencepiece"]["unigram"]["model"]
        (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(model))
    else:
        (tmp_path / "tiktoken.model").write_text(vocabularies["tiktoken"]["ranks"])
    config = {"tokenizer_class": "LlamaTokenizer" if kind == "pieces" else "TikTokenTokenizer", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    count = 10_000 if thorough else 100
    found = fuzzed(tmp_path, count)
    assert found["refused"] > count // 4 and found["read"] > count // 20


def fuzzed(folder: Path, count: int) -> dict[str, int]:
    """What became of that many damaged copies of a folder, by kind."""
    command = [sys.executable, "-m", "tests.jaxengine.tokens.fuzz_tokenizer", str(folder), "20261121", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert sum(found.values()) == count
    return found
