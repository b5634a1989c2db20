"""Texts that stand for images in prompts of Phi-4-multimodal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxengine.scheduler.base.errors import RequestError
from tests.fixtures.unit_pictures import picture
from tests.jaxengine.media.test_unit_processors import processor


def test_numbered_placeholders_of_phi4(tmp_path, monkeypatch):
    """As in the prompts of vLLM: texts that are no tokens. Images' numbers count."""
    made: Any = processor(tmp_path, "phi4_multimodal_vision")
    written = {"<|image_1|>": [90, 91], "<|image_2|>": [90, 92]}

    class Words:
        def encode(self, text: str, **_: Any) -> list[int]:
            parts = re.findall(r"<\|image_\d\|>|w\d+", text)
            return [token for part in parts for token in written.get(part) or [int(part[1:])]]

        def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
            return [f"w{token}" for token in token_ids]

    item, token = made.process("image", picture(3), {}), [127] * 13
    assert item.num_rows == 13
    monkeypatch.setattr(made, "tokenizer", Words())
    text = "w3<|image_1|>w4<|image_2|>"
    plain = made.tokenizer.encode(text)
    assert made.encode(text, [9, *plain]) == [9, 3, 127, 4, 127]
    assert made.encode("w3", [3]) == [3] and made.encode(text, [8]) == [8]
    assert made.expand(plain, {"image": [item, item]}).token_ids == [3, *token, 4, *token]
    with pytest.raises(RequestError, match=r"must count from 1 in a prompt, got 2, 1"):
        made.encode("<|image_2|><|image_1|>", plain)
