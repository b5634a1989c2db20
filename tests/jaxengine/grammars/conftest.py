"""Fixtures of the tests of structured outputs: one engine of random weights that speaks SmolLM2's tokenizer."""

from __future__ import annotations

import pytest

from tests.jaxengine.server.conftest import chat_model, chat_options

__all__ = ["chat_model", "chat_options"]


@pytest.fixture(scope="session")
def chat_llm(chat_options):
    from jaxengine import LLM

    with LLM(**chat_options) as llm:
        yield llm
