"""Fixtures of the tests of structured outputs: engines of random weights that speak SmolLM2's tokenizer."""

from __future__ import annotations

import pytest

from tests.jaxengine.server.conftest import chat_model, chat_options, compiling

__all__ = ["chat_model", "chat_options"]


@pytest.fixture(scope="session")
def chat_llm(chat_options, pytestconfig):
    from jaxengine import LLM

    with compiling(pytestconfig):
        llm = LLM(**chat_options)
    with llm:
        yield llm


@pytest.fixture(scope="session")
def step_by_step(chat_options, pytestconfig):
    """The same with no step ahead."""
    from jaxengine import LLM

    with compiling(pytestconfig):
        llm = LLM(**chat_options, async_scheduling=False)
    with llm:
        yield llm
