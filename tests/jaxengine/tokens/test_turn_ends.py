"""Tokens that end an answer of a GGUF chat model whose eos is the base model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.gguf_ends import CONTROL, USER_DEFINED, named_turn_ends
from jaxengine.models.registry import read_gguf
from jaxengine.tokens.template_renderer import TemplateRenderer
from jaxengine.tokens.tokenizer import Tokenizer
from tests.tables import each_row

PIECES = json.loads((Path(__file__).parents[2] / "fixtures" / "tokenizer_ids.json").read_text())["sentencepiece"]
SIZE = len(PIECES["tokens"])
SHAPE = {
    "general.architecture": "llama",
    **{f"llama.{name}": 8 for name in ("embedding_length", "block_count", "feed_forward_length", "context_length")},
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(autouse=True, scope="module")
def one_process():
    """All templates are rendered in the same process."""
    renderer = TemplateRenderer()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxengine.tokens.tokenizer.TemplateRenderer", lambda: renderer)
        yield


def metadata(*added: str, kind: int = CONTROL, template: str | None = None, **changes: Any) -> dict[str, Any]:
    """A vocabulary with further tokens of one kind, whose eos is 2."""
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [*PIECES["tokens"], *added],
        "scores": np.array([*PIECES["scores"], *([-1e4] * len(added))], np.float32),
        "token_type": np.array([*PIECES["token_type"], *([kind] * len(added))], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return SHAPE | named | ({} if template is None else {"tokenizer.chat_template": template})


def ends(values: dict[str, Any]) -> tuple[int, ...]:
    """Ends of the tokenizer."""
    return Tokenizer.from_gguf(values).eos_token_ids


@each_row(
    "added,expected",
    [
        (("<start_of_turn>", "<end_of_turn>"), (1,)),
        (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"), (2, 3)),
        (("<|end|>", "<|user|>", "<|assistant|>"), (0,)),
        (("<|im_start|>", "<|im_end|>"), (1,)),
        (("<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|call|>"), (2, 4)),  # a message's end is no turn's
        (("<|end|>", "<|flush|>", "<|calls|>"), (1, 2)),
        (("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"), (1,)),
        (("<unheard_of>",), ()),
    ],
)
def test_known_names(added, expected):
    expected = (2, *(SIZE + at for at in expected))
    for kind in (CONTROL, USER_DEFINED):
        values = metadata(*added, kind=kind)
        assert ends(values) == expected == read_gguf(values).eos_token_ids
    for kind in (1, 5):  # text like any other, and unused
        values = metadata(*added, kind=kind)
        assert ends(values) == (2,) == read_gguf(values).eos_token_ids


def test_listed_ends():
    for listed in (np.array([7, 2, 9], np.uint32), [7, 2, 9]):
        values = metadata("<end_of_turn>", eos_token_ids=listed, eot_token_id=11)
        assert ends(values) == read_gguf(values).eos_token_ids == (2, 11, 7, 9, SIZE)
    assert ends(metadata(eos_token_ids=7)) == (2, 7)
    for wrong in (np.array([SIZE]), ["7"], np.array([-1]), np.array([1.5]), True, "7"):
        with pytest.raises(ModelFileError, match=f"must be ids from 0 to {SIZE - 1}, .*eos_token_ids"):
            Tokenizer.from_gguf(metadata(eos_token_ids=wrong), path="some.gguf")
        with pytest.raises(ModelConfigError, match="token id"):
            read_gguf(metadata(eos_token_ids=wrong))


def test_types_of_another_kind_do_not_count():
    for types in (3, "3", ["3"] * (SIZE + 1), np.full(SIZE + 1, np.nan)):
        assert named_turn_ends(metadata("<end_of_turn>", token_type=types)) in ((), (SIZE,))


def test_names_beyond_the_embedding_do_not_count():
    values = metadata("<end_of_turn>") | {"llama.vocab_size": SIZE}
    assert read_gguf(values).eos_token_ids == (2,)


EACH = "{% for m in messages %}"
GENERATION = "{% if add_generation_prompt %}"


@each_row(
    "template,expected",
    [
        (EACH + "<A>{{ m.role }}\n{{ m.content }}<Z>\n{% endfor %}", "<Z>"),
        (EACH + "<A>{{ m.role }}<B>\n{{ m.content | trim }} <Z>{% endfor %}", "<Z>"),
        (EACH + "{{ '<A>' if m.role == 'user' else '<B>' }}{{ m.content }}<Z>{% endfor %}<B>", "<Z>"),
        (EACH + "{{ '<A>' + m.content if m.role == 'user' else '<B>' + m.content + '<Z>' }}{% endfor %}", "<Z>"),
        (EACH + "{{ m.role }}: {{ m.content }}<Z>{% endfor %}", "<Z>"),
        ("System.<Z>" + EACH + "{{ m.role }}: {{ m.content }}<Z>{% endfor %}", "<Z>"),
        (EACH + "{{ m.content }}{{ '<' + 'Z>' if m.role == 'assistant' }}{% endfor %}", "<Z>"),
        # The end is the eos, or nothing.
        (EACH + "<A>{{ m.content }}{{ eos_token }}{% endfor %}", None),
        (EACH + "<A>{{ m.content }}{% endfor %}", None),
        ("{{ bos_token }}" + EACH + "{{ m.content }}{{ bos_token }}{% endfor %}", None),
        # What follows begins a turn.
        (EACH + "<A>{{ m.role }}\n{{ m.content }}\n{% endfor %}<A>assistant\n", None),
        (EACH + "{{ '<A>' if m.role == 'user' else '<B>' }}{{ m.content }}{% endfor %}<B>", None),
        (EACH + "{{ m.content }}{% endfor %}<|im_start|>", None),
        # No conversation comes of it.
        (EACH + "<A>{{ raise_exception('no') }}{% endfor %}", None),
        (EACH + "<A>{% endfor %}", None),
        (EACH + "<A>", None),
    ],
)
def test_end_that_the_template_writes(template, expected):
    added = ("<A>", "<B>", "<Z>", "<|im_start|>")
    for kind in (CONTROL, USER_DEFINED):
        found = ends(metadata(*added, kind=kind, template=template))
        assert found == (2, *(() if expected is None else (SIZE + added.index(expected),))), kind


def test_template_with_a_known_end_is_not_rendered(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("it needs no process")

    monkeypatch.setattr(Tokenizer, "apply_chat_template", fail)
    chatml = EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert ends(metadata("<|im_start|>", "<|im_end|>", template=chatml)) == (2, SIZE + 1)
    with pytest.raises(AssertionError, match="needs no process"):
        ends(metadata("<|im_start|>", "<|im_end|>", "<Z>", template=chatml + "<Z>"))
