"""Objects of a JSON schema that are given no other properties than it lists, where it does not say.

Who lists properties mostly means those, and a weak model goes on inventing others where it may. An object is closed
only where that is safe: what keeps to the schema that comes out keeps to the one that went in, and what kept to the
one that went in keeps to the other once the properties that nobody lists are taken out of it. Knows no grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

# Beside `properties`, what says itself which others there are, or could not do without them.
_NEEDS_OTHERS = frozenset(
    ("additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties", "const", "enum")
    + ("dependentRequired", "dependentSchemas", "dependencies")
)
# What a schema says itself about a value, be there other schemas for that value or not.
_OWN = _NEEDS_OTHERS | frozenset(
    ("properties", "patternProperties", "required", "maxProperties", "items", "prefixItems", "additionalItems")
    + ("unevaluatedItems", "contains")
)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Schemas whose place in the meaning of the whole nobody follows here.
_UNCLEAR = ("not", "if", "then", "else", "contains", "unevaluatedProperties", "dependentSchemas", "dependencies")


class _UnclearError(ValueError):
    """A schema of which it cannot be said what its parts apply to."""


def close_objects(text: str) -> str:
    """The schema, as text, with `"additionalProperties": false` in each object that can be closed safely.

    Such an object lists properties, all that it requires among them, is alone in saying what its value is (not one
    part of an allOf, nor beside a $ref or an anyOf, wherever it is referred to from), and is no branch of a oneOf,
    unless a constant of each branch tells them apart.
    """
    if '"properties"' not in text:
        return text
    schema = json.loads(text)
    try:
        found = list(_closable(schema))
    except _UnclearError:
        return text
    for each in found:
        each["additionalProperties"] = False
    return json.dumps(schema, separators=(",", ":")) if found else text


def lists_all(schema: dict[str, Any]) -> bool:
    """Whether the object's own properties are all that it needs, as far as its own keywords say."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or _NEEDS_OTHERS & schema.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _closable(root: Any) -> Iterator[dict[str, Any]]:
    """Raises _UnclearError."""
    waiting: list[tuple[Any, bool]] = [(root, True)]
    seen: dict[tuple[int, bool], dict[str, Any]] = {}
    while waiting:
        schema, alone = waiting.pop()
        if not isinstance(schema, dict) or (id(schema), alone) in seen:
            continue
        if schema is not root and isinstance(schema.get("$id"), str):
            raise _UnclearError("references inside of it count from there")
        seen[id(schema), alone] = schema
        waiting += _parts(schema, alone, root)
    for (number, alone), schema in seen.items():
        if alone and (number, False) not in seen and schema.get("properties") and _num_rules(schema) == 1:
            if lists_all(schema):
                yield schema


def _num_rules(schema: dict[str, Any]) -> int:
    """How many schemas say what one value is."""
    count = bool(_OWN & schema.keys()) + sum(word in schema for word in (*_REFERENCES, "anyOf", "oneOf", "not", "if"))
    return count + len(_listed(schema, "allOf"))


def _parts(schema: dict[str, Any], alone: bool, root: Any) -> Iterator[tuple[Any, bool]]:
    """The schemas inside, and whether each is alone in saying what its value is. Raises _UnclearError."""
    alone = alone and _num_rules(schema) == 1
    for word in _REFERENCES:
        if word in schema:
            yield _resolved(schema[word], root), alone
    for word in ("allOf", "anyOf"):
        yield from ((each, alone) for each in _listed(schema, word))
    branches = _listed(schema, "oneOf")
    apart = alone and _told_apart([_followed(each, root) for each in branches])
    yield from ((each, apart) for each in branches)
    # A name may be both one of `properties` and one that a pattern takes.
    patterns, properties = _named(schema, "patternProperties"), _named(schema, "properties")
    by_name = alone and len(patterns) + bool(properties) <= 1
    yield from ((each, by_name) for each in (*patterns, *properties))
    in_list = alone and "contains" not in schema and not schema.get("uniqueItems")
    for word in ("items", "prefixItems", "additionalItems", "unevaluatedItems"):
        yield from ((each, in_list) for each in _listed(schema, word) or [schema.get(word)])
    yield schema.get("additionalProperties"), alone
    for word in _UNCLEAR:
        yield from ((each, False) for each in (schema.get(word), *_named(schema, word)))


def _told_apart(branches: list[Any]) -> bool:
    """Whether a property that each of the objects requires has another constant in each of them."""
    constants = []
    for branch in branches:
        properties, required = branch.get("properties"), branch.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return False
        rules = {name: properties.get(name) for name in required if isinstance(name, str)}
        constants.append({name: _constant(rule) for name, rule in rules.items() if _constant(rule) is not None})
    names = constants[0].keys() if constants else ()
    return any(len({each.get(name) for each in constants} - {None}) == len(branches) for name in names)


def _constant(rule: Any) -> str | None:
    found = rule.get("const") if isinstance(rule, dict) else None
    return found if isinstance(found, str) else None


def _followed(schema: Any, root: Any) -> dict[str, Any]:
    """What a schema that is but a reference refers to. Raises _UnclearError."""
    found = _resolved(schema["$ref"], root) if isinstance(schema, dict) and "$ref" in schema else schema
    return found if isinstance(found, dict) else {}


def _resolved(reference: Any, root: Any) -> Any:
    """The schema at a JSON pointer. Raises _UnclearError."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _UnclearError(f"{reference} is no pointer")
    found = root
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise _UnclearError(f"{reference} points nowhere")
    return found


def _listed(schema: dict[str, Any], word: str) -> list[Any]:
    found = schema.get(word)
    return found if isinstance(found, list) else []


def _named(schema: dict[str, Any], word: str) -> list[Any]:
    found = schema.get(word)
    return list(found.values()) if isinstance(found, dict) else []
