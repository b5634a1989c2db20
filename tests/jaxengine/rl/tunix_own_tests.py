"""Tunix's own tests of its rollout interface, with jaxengine.rl.tunix.JaxengineRollout in place of Tunix's mock engine.

`python -m tests.jaxengine.rl.tunix_own_tests`, where google-tunix 0.1.7, jaxtyping and absl-py are installed, prints a
line for each test and ends with an error if one fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import unittest
from types import ModuleType
from typing import Any

from tests.jaxengine.rl.tunix_base import NAME

ROLLOUTS = NAME.rpartition(".")[0]
# Parts of names of tests -> why this engine does not do what they ask for.
MOCKS_OWN = {
    "distribution": "lengths drawn at random are the mock's",
    "sleep_time_bounds": "the latency is the mock's",
    "get_target_length": "a method of the mock",
    "without_tokenizer": "JaxengineRollout has a tokenizer",
    "encode_exception": "the tokenizer's error is raised, instead of made-up tokens",
    "returns_empty": "a prompt without a token is refused",
    "prompt_truncation": "a longer prompt is kept whole, as in Tunix's vLLM engine",
    "get_per_token_logps": "expects zeros",
    "update_params": "expects that an unknown tree is ignored",
    "model_property": "model() is None, so that Tunix sends weights after each step",
}


def load() -> tuple[Any, Any]:
    """Import Tunix's tests and mock engine without the package's other parts, whose dependencies they do not need."""
    spec = importlib.util.find_spec("tunix")
    assert spec is not None, "google-tunix is not installed"
    package = sys.modules["tunix"] = ModuleType("tunix")
    package.__path__ = list(spec.submodule_search_locations or ())
    names = ("test_mock_rollout", "mock_rollout")
    tests, mock = (importlib.import_module(f"{ROLLOUTS}.{name}") for name in names)
    return tests, mock


def main() -> int:
    tests, mock = load()
    from jaxengine import LLM
    from jaxengine.rl.tunix import JaxengineRollout
    from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS

    class Rollout(JaxengineRollout):
        """The engine with what the tests ask of the mock besides: a call of sleep, and a list as `logits`."""

        def generate(self, prompts: Any, rollout_config: Any, **kwargs: Any) -> Any:
            mock.time.sleep(0.01)
            found = super().generate(prompts, rollout_config, **kwargs)
            assert found.logits is None  # as in Tunix's vLLM engine
            found.logits = [None] * len(found.text)
            return found

    class Words(tests.FakeTokenizer):
        """A token for each word: of a prompt for which a test brings no tokenizer, and which the mock would cut."""

        def encode(self, text: str) -> list[int]:
            return super().encode(text.split())

    options = {**TINY_OPTIONS, "model": str(TINY_CHECKPOINT), "max_model_len": 64}
    options["logprobs_mode"] = "processed_logprobs"
    with LLM(**options) as llm:

        def rollout(tokenizer: Any = None, rollout_config: Any = None, **_: Any) -> Rollout:
            return Rollout(None, tokenizer or Words(), rollout_config=rollout_config, llm=llm)

        mock.MockRollout = rollout
        suite, result = unittest.TestSuite(), unittest.TestResult()
        for name in unittest.defaultTestLoader.getTestCaseNames(tests.MockRolloutTest):
            reason = next((text for part, text in MOCKS_OWN.items() if part in name), None)
            print(f"{name}: {reason or 'run'}")
            if reason is None:
                suite.addTest(tests.MockRolloutTest(name))
        suite.run(result)
    for case, text in (*result.failures, *result.errors):
        print(f"{case.id()} has failed:\n{text}")
    print(f"{result.testsRun - len(result.failures) - len(result.errors)} of {result.testsRun} tests pass")
    return int(not result.wasSuccessful())


if __name__ == "__main__":
    sys.exit(main())
