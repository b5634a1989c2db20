"""Types of fields that clients fill as they like: what is too much ends before anything is made of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema


def at_most(number: int) -> BeforeValidator:
    """Of a list or an object with more entries than `number` none is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > number:
            raise ValueError(f"at most {number} entries are allowed, not {len(value)}")
        return value

    return BeforeValidator(check)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it must be an object")
    return value


def _all_texts(value: Any) -> Any:
    if isinstance(value, dict):
        wrong = next((name for name, item in value.items() if not isinstance(item, str)), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:100]} must be a text")
    return value


# Lists and objects end at their first fault: a body has room for millions of them.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# An object as it was read. pydantic would copy it entry by entry, and nothing else would run meanwhile.
JsonObject = Annotated[
    dict[str, Any], PlainValidator(_object), WithJsonSchema({"type": "object", "additionalProperties": True})
]
TextsByName = Annotated[dict[str, str], BeforeValidator(_all_texts)]
# Names in an object of options, of which none has so many.
MAX_OPTIONS = 256
# What requests may set in a chat template beside the conversation.
TemplateVariables = Annotated[JsonObject, at_most(MAX_OPTIONS)]
