"""What `LLM.get_tokenizer` gives: the tokenizer of transformers, which splits text as the engine does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.tokens.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "tokenizer_ids.json").read_text())
MESSAGES = [{"role": "user", "content": "Hi, who are you?"}]


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    tokenizer = open_model(EngineConfig()).load_tokenizer(EngineConfig())
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def of_folder(embedded, tmp_path_factory) -> Tokenizer:
    """The same vocabulary from a Hugging Face folder, with what only its files say."""
    folder = tmp_path_factory.mktemp("tokenizer")
    embedded.hf.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", None]}
    config |= {"model_max_length": 2048, "padding_side": "left", "auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'canary')!r}, 'w')")
    tokenizer = Tokenizer.from_hf_folder(folder)
    assert tokenizer.hf is tokenizer.hf and not (folder / "canary").exists()
    return tokenizer


@pytest.mark.parametrize("name", ["embedded", "of_folder"])
def test_it_is_transformers_and_agrees_with_the_engines(name, request):
    ours = request.getfixturevalue(name)
    theirs = ours.hf
    assert isinstance(theirs, PreTrainedTokenizerFast)
    for text in [*RECORDED["texts"], "<|im_start|>user\nx<|im_end|>", ""]:
        ids = ours.encode(text)
        assert theirs(text).input_ids == theirs.encode(text) == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == ours.apply_chat_template(
        MESSAGES
    )
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token_id) == ("<|im_end|>", ours.eos_token_id, 1)
    assert theirs.get_vocab()["<|im_end|>"] == 2 and len(theirs) == len(ours) == 49152
    assert theirs.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]
    assert theirs.encode("a cat", add_special_tokens=False) == ours.encode("a cat", add_special_tokens=False)


def test_what_the_files_of_a_folder_say_is_kept(of_folder):
    assert (of_folder.hf.model_max_length, of_folder.hf.padding_side) == (2048, "left")


def test_changes_do_not_reach_the_engine(embedded):
    before = embedded.encode("one two")
    embedded.hf.add_tokens(["one two"])
    try:
        assert embedded.hf.encode("one two") != before == embedded.encode("one two")
    finally:
        del embedded.hf


def test_transformers_is_imported_when_it_is_asked_for():
    """It takes seconds, and an engine needs none of it."""
    code = (
        "import sys; from jaxengine.tokens.tokenizer import Tokenizer; from jaxengine import LLM, SamplingParams; LLM; "
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
