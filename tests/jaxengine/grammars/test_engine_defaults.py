"""structured_outputs_config acts on requests that say nothing of the kind."""

from __future__ import annotations

import json

from jaxengine import LLM, SamplingParams

# The request alone would be refused: no grammar can enforce uniqueItems.
SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3, "uniqueItems": True}


def test_switches_of_the_engine_reach_a_request(chat_options):
    config = {"lenient": True, "disable_any_whitespace": True}
    params = SamplingParams(temperature=1, seed=3, max_tokens=30, structured_outputs={"json": SCHEMA})
    with LLM(**chat_options, structured_outputs_config=config) as llm:
        text = llm.generate("Answers:", params, use_tqdm=False)[0].outputs[0].text
    assert json.dumps(json.loads(text), separators=(",", ":")) == text
