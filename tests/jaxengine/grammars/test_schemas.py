"""Sixty schemas at temperature 1 from random weights: whatever ends, ends valid."""

from __future__ import annotations

import json

import jsonschema
import pytest

from jaxengine.requests.params.sampling_params import SamplingParams
from tests.jaxengine.grammars.schemas import SCHEMAS

SPACES = ({"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]?"})
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def check(schema, text):
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


def test_sampled_outputs_are_valid(chat_llm, thorough, report):
    assert len(SCHEMAS) == 60
    samples, masks = 8 if thorough else 1, chat_llm.core.engine.extensions.require("structured").masks
    before = masks.num_masks, masks.seconds
    params = [
        SamplingParams(
            max_tokens=200, seed=1000 + index, n=samples, structured_outputs={"json": schema, **SPACES[index % 2]}
        )
        for index, schema in enumerate(SCHEMAS.values())
    ]
    outputs = chat_llm.generate(["An example:"] * len(params), params, use_tqdm=False)
    ended = 0
    for (name, schema), output in zip(SCHEMAS.items(), outputs, strict=True):
        for each in output.outputs:
            assert each.finish_reason in ("stop", "length"), (name, each)
            if each.finish_reason == "stop":
                ended += 1
                try:
                    check(schema, each.text)
                except (ValueError, jsonschema.ValidationError) as error:
                    raise AssertionError(f"{name}: {each.text!r} is not valid: {error}") from None
    assert ended >= 0.95 * samples * len(SCHEMAS)
    assert chat_llm.core.runner.compiles.count == 0
    count, seconds = masks.num_masks - before[0], masks.seconds - before[1]
    report(f"structured outputs: {ended} valid of {samples * len(SCHEMAS)}, {1e6 * seconds / count:.0f} us per mask")


@pytest.mark.parametrize(
    ("name", "text"), [("person", '{"name":"x","age":121}'), ("date", '"2024-13-01"'), ("tuple", '[1,"a",true,1]')]
)
def test_the_check_refuses(name, text):
    with pytest.raises(jsonschema.ValidationError):
        check(SCHEMAS[name], text)
