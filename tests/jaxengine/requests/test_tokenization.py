"""vLLM's tokenization_kwargs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine import RequestError
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.tokenization import num_kept, tokenized
from tests.tables import each_row


class Tokenizer:
    """A token for each letter, after token 1, the special one."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) - 90 for letter in text]


def inputs() -> InputProcessor:
    sizes: Any = SimpleNamespace(vocab_size=100, max_model_len=5)
    tokenizer: Any = Tokenizer()
    return InputProcessor(sizes, sizes, tokenizer, {})


@each_row(
    "prompt,given,token_ids",
    [
        ("abc", {}, [1, 7, 8, 9]),
        ("abc", {"add_special_tokens": False}, [7, 8, 9]),
        ("abc", {"truncate_prompt_tokens": 2}, [8, 9]),
        ("abc", {"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 7]),
        ("abcdefgh", {"truncate_prompt_tokens": -1}, [11, 12, 13, 14]),
        ([7, 8, 9], {"truncate_prompt_tokens": 2}, [8, 9]),
        ({"prompt_token_ids": [7, 8, 9]}, {"truncate_prompt_tokens": 9}, [7, 8, 9]),
        ({"prompt": "abc", "prompt_token_ids": [3, 4]}, {"add_special_tokens": False}, [3, 4]),
    ],
)
def test_tokens_of_a_prompt(prompt, given, token_ids):
    found: Any = tokenized(inputs(), prompt, given)
    assert list(found["prompt_token_ids"]) == token_ids
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None
    assert found.get("prompt") == text


def test_other_keys_of_a_prompt_are_kept():
    found: Any = tokenized(inputs(), {"prompt": "a", "cache_salt": "x"}, {})
    assert found == {"prompt": "a", "prompt_token_ids": [1, 7], "cache_salt": "x"}


@each_row(
    "prompt,given,said",
    [
        ("a", 5, "tokenization_kwargs must be a dict that may have truncate_prompt_tokens, add_special"),
        ("a", {"padding": True}, "tokenization_kwargs must be"),
        ("a", {"truncate_prompt_tokens": 0}, "tokenization_kwargs.truncate_prompt_tokens must be -1 or an int >= 1"),
        ("a", {"truncate_prompt_tokens": True}, "must be -1 or an int >= 1, got True"),
        ("a", {"truncation_side": "up"}, "truncation_side must be 'left' or 'right', got 'up'"),
        ("a", {"add_special_tokens": 1}, "add_special_tokens must be True or False, got 1"),
        ({"prompt": "a", "multi_modal_data": {}}, {}, "are for prompts without multi_modal_data"),
    ],
)
def test_what_is_refused(prompt, given, said):
    with pytest.raises(RequestError, match=said) as error:
        tokenized(inputs(), prompt, given)
    assert error.value.param == "tokenization_kwargs"


def test_pooling_methods_take_the_number_to_keep():
    assert [num_kept(None, 3), num_kept({}, 3), num_kept({"truncate_prompt_tokens": 2}, 3)] == [3, 3, 2]
    with pytest.raises(RequestError, match="a dict that may have truncate_prompt_tokens, got {'padding': True}"):
        num_kept({"padding": True})
