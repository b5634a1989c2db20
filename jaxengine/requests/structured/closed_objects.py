"""Closing of objects: forbids additional properties in objects of a JSON schema that does not mention them.

An object is closed only if that is safe: instances of the resulting schema are instances of the original one, and
instances of the original one, without unlisted properties, are instances of the resulting one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jaxengine.schema_references import REFERENCES, SchemaDocument, UnresolvedError

# Keywords that mention other properties than those listed, or depend on them.
_NEEDS_OTHERS = frozenset(
    ("additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties", "const", "enum")
    + ("dependentRequired", "dependentSchemas", "dependencies")
)
# Keywords of a schema's own constraints on a value.
_OWN = _NEEDS_OTHERS | frozenset(
    ("properties", "patternProperties", "required", "maxProperties", "items", "prefixItems", "additionalItems")
    + ("unevaluatedItems", "contains")
)
# Keywords whose subschemas' applicability is not analysed here.
_UNCLEAR = ("not", "if", "then", "else", "contains", "unevaluatedProperties", "dependentSchemas", "dependencies")


class _UnclearError(ValueError):
    """Raised for a schema with a part whose applicability cannot be determined."""


def forbid_additional_properties(text: str) -> str:
    """Return the schema (JSON text) with `"additionalProperties": false` in each object that can be closed safely.

    Such an object lists properties, including all required ones. No other schema applies to the same value (it is not
    part of an allOf, nor next to a $ref or anyOf, wherever it is referred to from). It is not a branch of a oneOf,
    unless a constant in each branch distinguishes them. The text is returned unchanged if there is no such object, or
    if a part of the schema cannot be analysed. Raises ValueError for text that is not JSON, unless it lacks
    "properties" and is not parsed.
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
    """Return whether a schema has `properties` that include all required ones, and no other keyword that mentions or
    counts properties.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or _NEEDS_OTHERS & schema.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _closable(root: Any) -> Iterator[dict[str, Any]]:
    """Yield the dicts within the schema `root` (mutable, not copies) that can be closed safely. Raises _UnclearError
    for parts with an $id, and references that lead nowhere.
    """
    waiting: list[tuple[Any, bool]] = [(root, True)]
    seen: dict[tuple[int, bool], dict[str, Any]] = {}
    while waiting:
        schema, alone = waiting.pop()
        if not isinstance(schema, dict) or (id(schema), alone) in seen:
            continue
        if schema is not root and isinstance(schema.get("$id"), str):
            raise _UnclearError("references within it are relative to its $id")
        seen[id(schema), alone] = schema
        waiting += _parts(schema, alone, root)
    for (number, alone), schema in seen.items():
        if alone and (number, False) not in seen and schema.get("properties") and _num_rules(schema) == 1:
            if lists_all(schema):
                yield schema


def _num_rules(schema: dict[str, Any]) -> int:
    """Return the number of schemas in this one that apply to the same value: 1 for its own keywords, 1 for each
    reference, anyOf, oneOf, not and if, and the number of branches of allOf.
    """
    count = bool(_OWN & schema.keys()) + sum(word in schema for word in (*REFERENCES, "anyOf", "oneOf", "not", "if"))
    return count + len(_listed(schema, "allOf"))


def _parts(schema: dict[str, Any], alone: bool, root: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (subschema, whether it alone applies to its value). For keywords that are absent the subschema is None.

    alone: whether `schema` alone applies to its value; root: the whole schema, in which references are looked up.
    Raises _UnclearError for a reference that cannot be resolved.
    """
    alone = alone and _num_rules(schema) == 1
    for word in REFERENCES:
        if word in schema:
            yield _resolved(schema[word], root), alone
    for word in ("allOf", "anyOf"):
        yield from ((each, alone) for each in _listed(schema, word))
    branches = _listed(schema, "oneOf")
    apart = alone and _have_discriminator([_followed(each, root) for each in branches])
    yield from ((each, apart) for each in branches)
    # A name may be in `properties` and also match a pattern.
    patterns, properties = _named(schema, "patternProperties"), _named(schema, "properties")
    by_name = alone and len(patterns) + bool(properties) <= 1
    yield from ((each, by_name) for each in (*patterns, *properties))
    in_list = alone and "contains" not in schema and not schema.get("uniqueItems")
    for word in ("items", "prefixItems", "additionalItems", "unevaluatedItems"):
        yield from ((each, in_list) for each in _listed(schema, word) or [schema.get(word)])
    yield schema.get("additionalProperties"), alone
    for word in _UNCLEAR:
        yield from ((each, False) for each in (schema.get(word), *_named(schema, word)))


def _have_discriminator(branches: list[Any]) -> bool:
    """Return whether a property that all branches require has a different string constant in each. branches: resolved
    schemas.
    """
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
    """Return the string that the schema `rule` has as `const`; None without one."""
    found = rule.get("const") if isinstance(rule, dict) else None
    return found if isinstance(found, str) else None


def _followed(schema: Any, root: Any) -> dict[str, Any]:
    """Return a schema, or the one its $ref points to in `root`; {} if that is not an object. Raises _UnclearError for a
    reference that cannot be resolved.
    """
    found = _resolved(schema["$ref"], root) if isinstance(schema, dict) and "$ref" in schema else schema
    return found if isinstance(found, dict) else {}


def _resolved(reference: Any, root: Any) -> Any:
    """Return the schema at a JSON pointer into `root`, "#" or "#/...". Raises _UnclearError for other references, and
    for one that leads nowhere.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _UnclearError(f"{reference} is not a pointer")
    try:
        return SchemaDocument(root).resolve(reference).schema
    except UnresolvedError as error:
        raise _UnclearError(str(error)) from None


def _listed(schema: dict[str, Any], word: str) -> list[Any]:
    """Return the list under the keyword `word` of a schema; [] for other values and without it."""
    found = schema.get(word)
    return found if isinstance(found, list) else []


def _named(schema: dict[str, Any], word: str) -> list[Any]:
    """Return the values of the object under the keyword `word` of a schema; [] for other values and without it."""
    found = schema.get(word)
    return list(found.values()) if isinstance(found, dict) else []
