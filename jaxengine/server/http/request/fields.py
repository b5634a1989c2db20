"""Types of fields with client-defined content, which limit its size before it is processed, and checks of fields that
several requests have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.options import ServerConfig

_TOKEN_ID = re.compile("-?[0-9]{1,18}")


def at_most(number: int) -> BeforeValidator:
    """Return a validator that refuses a list or object with more than `number` entries, before its entries are
    validated. Other values pass.
    """

    def check(value: Any) -> Any:
        """Return the value unchanged. Raises ValueError for too many entries."""
        if isinstance(value, list | dict) and len(value) > number:
            raise ValueError(f"at most {number} entries are allowed, not {len(value)}")
        return value

    return BeforeValidator(check)


def _object(value: Any) -> dict[str, Any]:
    """Return the value unchanged. Raises ValueError unless it is an object."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object")
    return value


def _all_texts(value: Any) -> Any:
    """Return the value unchanged. Raises ValueError for an object in which a value is not a text. A value that is not
    an object passes.
    """
    if isinstance(value, dict):
        wrong = next((name for name, item in value.items() if not isinstance(item, str)), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:100]} must be a text")
    return value


# Validation of lists and objects stops at the first error: a body may have millions.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# An object, used as it was parsed. pydantic would copy it entry by entry, blocking other threads.
JsonObject = Annotated[
    dict[str, Any], PlainValidator(_object), WithJsonSchema({"type": "object", "additionalProperties": True})
]
TextsByName = Annotated[dict[str, str], BeforeValidator(_all_texts)]
# Limit of names in an object of options.
MAX_OPTIONS = 256
# Variables of a chat template that requests may set.
TemplateVariables = Annotated[JsonObject, at_most(MAX_OPTIONS)]


def check_n(n: int | None, config: ServerConfig) -> None:
    """Raise RequestError for a number of outputs below 1 or above the server's max_n. None passes."""
    if n is not None and not 1 <= n <= config.max_n:
        raise RequestError(f"n is {show_value(n)}; allowed: 1 to {config.max_n}", param="n", value=n)


def check_truncation(keep: int | None) -> None:
    """Raise RequestError for a truncate_prompt_tokens other than -1 and integers from 1. None passes."""
    if keep is not None and keep != -1 and keep < 1:
        problem = f"truncate_prompt_tokens is {keep}; allowed: -1 and integers from 1"
        raise RequestError(problem, param="truncate_prompt_tokens", value=keep)


def bias_by_id(logit_bias: Mapping[str, Any], vocab_size: int) -> dict[int, Any]:
    """Return logit_bias with its keys, texts in JSON, converted to token ids. Raises RequestError for keys that are not
    whole numbers, for two keys of the same number, and for more than `vocab_size` keys. Values, and whether an id is in
    the vocabulary, are not checked.
    """
    if len(logit_bias) > vocab_size:
        raise RequestError(
            f"logit_bias has {len(logit_bias)} entries; the vocabulary has {vocab_size}", param="logit_bias"
        )
    wrong = next((key for key in logit_bias if not _TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise RequestError(
            f"logit_bias has the key {show_value(wrong)}; allowed: token ids", param="logit_bias", value=wrong
        )
    found = {int(key): value for key, value in logit_bias.items()}
    if len(found) < len(logit_bias):
        twice = next(key for key in logit_bias if key != str(int(key)))
        problem = f"logit_bias has two keys for one token id, such as {show_value(twice)}; allowed: one for each"
        raise RequestError(problem, param="logit_bias", value=twice)
    return found
