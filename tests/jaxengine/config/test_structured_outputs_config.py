"""structured_outputs_config: what it switches on reaches every schema, and what is not here is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jaxengine import SamplingParams
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.structured_outputs_config import StructuredOutputsConfig

SCHEMA = {"type": "array", "items": {"properties": {"a": {"type": "integer"}}}}
# vLLM's whole default, as a script may write it out.
VLLMS = {
    "backend": "auto",
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "reasoning_parser": "",
    "reasoning_parser_plugin": "",
    "enable_in_reasoning": False,
}


def grammar(config: StructuredOutputsConfig, **structured):
    return SamplingParams(structured_outputs=structured).token_params((), config.chosen).grammar


def test_vllms_defaults_are_ours_but_for_objects_that_are_closed():
    written = EngineConfig(structured_outputs_config=VLLMS).structured_outputs_config
    assert written == StructuredOutputsConfig(disable_additional_properties=False)
    assert EngineConfig().structured_outputs_config == StructuredOutputsConfig(disable_additional_properties=True)


def test_objects_are_closed_unless_the_server_or_the_request_says_otherwise():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    on, off = StructuredOutputsConfig(), StructuredOutputsConfig(disable_additional_properties=False)
    closed, open_ = schema | {"additionalProperties": False}, schema
    for config, asked, expected in (
        (on, None, closed),
        (on, True, closed),
        (on, False, open_),
        (off, None, open_),
        (off, True, closed),
        (off, False, open_),
    ):
        made = grammar(config, json=schema, disable_additional_properties=asked)
        assert json.loads(made.text) == expected, (config, asked)
    assert json.loads(grammar(on, json=schema | {"required": ["b"]}).text) == schema | {"required": ["b"]}


@pytest.mark.parametrize("name", StructuredOutputsConfig.switches())
def test_a_switch_is_as_if_every_request_had_it(name):
    none = StructuredOutputsConfig(disable_additional_properties=False)
    config = replace(none, **{name: True})
    assert grammar(config, json=SCHEMA) == grammar(none, json=SCHEMA, **{name: True})
    assert grammar(config, json_object=True) == grammar(none, json_object=True, **{name: True})
    assert grammar(config, regex="a+") == grammar(none, regex="a+")


def test_the_name_of_a_backend_changes_nothing():
    for backend in ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"):
        config = EngineConfig(structured_outputs_config={"backend": backend}).structured_outputs_config
        assert grammar(config, json=SCHEMA) == grammar(StructuredOutputsConfig(), json=SCHEMA)


def test_a_requests_white_space_goes_before():
    config = StructuredOutputsConfig(disable_any_whitespace=True)
    assert grammar(config, json=SCHEMA, whitespace_pattern=" ?").options == {"whitespace_pattern": " ?"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"backend": "xgrammer"}, "auto, guidance, xgrammar"),
        ({"reasoning_parser": 3}, "allowed: text"),
        ({"enable_in_reasoning": True}, "enable_in_reasoning"),
        ({"lenient": 1}, "lenient"),
        ({"whitespace": " "}, "it has backend, disable_any_whitespace"),
        ("guidance", "a dict"),
    ],
)
def test_what_is_not_here_is_refused(value, said):
    with pytest.raises(ConfigError, match=said) as error:
        EngineConfig(structured_outputs_config=value)
    assert error.value.param.startswith("structured_outputs_config")
