"""References within JSON schemas: their targets, and schemas that are moved into other schemas.

A reference is relative to the document that contains it, so a schema that moves into another one loses its targets.
`moved` copies a schema with its targets as definitions of the new document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

# Keywords whose value is an object of schemas by name, a list of schemas, or a schema. The values of all others are
# data, or have no effect.
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
SCHEMA = (
    *("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "contains"),
    *("propertyNames", "contentSchema", "not", "if", "then", "else"),
)
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
DEFINITIONS = ("$defs", "definitions")
_ANCHORS = ("$anchor", "$dynamicAnchor")
# Keywords that a moved schema loses: they have no effect without references to them.
_NOT_MOVED = frozenset((*DEFINITIONS, *_ANCHORS, "$id", "$schema", "$recursiveAnchor"))
_APPLIED = ("anyOf", "oneOf", "allOf")
_APPLIED_IF = ("then", "else")
# Limit of schemas that apply to one value: schemas refer to each other, and to themselves.
_MAX_APPLICABLE = 256
# Copies of deeper schemas are incomplete; StructuredOutputsParams refuses a schema long before.
_MAX_DEPTH = 64
_INDEX = re.compile("[0-9]{1,9}")


class UnresolvedError(ValueError):
    """Error of a reference that points to nothing, or to no schema, within its document."""


class Place(NamedTuple):
    """A part of a JSON schema document.

    Attributes:
      schema: the part, any JSON value.
      base: URI that references within it are relative to; "" without `$id`.
    """

    schema: Any
    base: str = ""

    def inside(self, schema: Any) -> Place:
        """Return `schema`, a part of this one, as a Place. Its base is its own `$id`, resolved against this base, or
        this base if it has no `$id` or only a fragment.
        """
        own = schema.get("$id") if isinstance(schema, Mapping) else None
        if not isinstance(own, str) or own.startswith("#"):
            return Place(schema, self.base)
        return Place(schema, _joined(self.base, own.partition("#")[0]))

    def subschemas(self) -> Iterator[Place]:
        """Yield the schemas that this schema directly contains."""
        if isinstance(self.schema, Mapping):
            for word in SCHEMAS_BY_NAME:
                yield from map(self.inside, mapping(self.schema, word).values())
            for word in SCHEMAS:
                yield from self.listed(word)
            yield from (self.inside(self.schema[word]) for word in SCHEMA if word in self.schema)

    def listed(self, word: str) -> list[Place]:
        """Return the schemas that a keyword such as "anyOf" lists, as Places; [] without such a list.

        word: the keyword.
        """
        found = self.schema.get(word) if isinstance(self.schema, Mapping) else None
        return [self.inside(each) for each in found] if isinstance(found, list) else []


def mapping(schema: Any, word: str) -> Mapping[str, Any]:
    """Return the JSON object that is the value of a keyword in a schema; {} if the schema has no such keyword or its
    value is not an object.

    word: the keyword.
    """
    found = schema.get(word) if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


class SchemaDocument:
    """A JSON schema document in which references can be resolved."""

    def __init__(self, root: Any):
        self.root = Place(None).inside(root)

    def resolve(self, reference: Any, base: str | None = None) -> Place:
        """Return the part that a reference points to: a JSON pointer ("#/properties/a"), an anchor ("#a") or either of
        these after the `$id` of a part of the document.

        base: URI that the reference is relative to; None for the root's. Raises UnresolvedError if the reference is not
        a string or points to nothing.
        """
        base = self.root.base if base is None else base
        if not isinstance(reference, str):
            raise UnresolvedError(f"the reference {reference!r} is not a string")
        uri, _, fragment = reference.partition("#")
        uri, fragment = _joined(base, uri), unquote(fragment)
        place = self.root if uri == self.root.base else self._named.get(uri)
        if fragment and not fragment.startswith("/"):
            place = self._named.get(f"{uri}#{fragment}")
        elif place is not None:
            place = _pointed(place, fragment)
        if place is None:
            raise UnresolvedError(f"the reference {reference!r} points to no part of its schema")
        return place

    def applicable(self, place: Place, always: bool = False) -> Iterator[Place]:
        """Yield the schemas that may apply to the same value as `place`: `place` itself, then, breadth first, those
        that it reaches through anyOf, oneOf, allOf, then, else and references; each once, at most _MAX_APPLICABLE.
        References without a target, and schemas that are no objects (true, false), are skipped, `place` included.

        always: yield only schemas that apply in any case, which leaves out anyOf, oneOf, then and else.
        """
        waiting, seen = [place], set[int]()
        while waiting and len(seen) < _MAX_APPLICABLE:
            place = waiting.pop(0)
            if not isinstance(place.schema, Mapping) or id(place.schema) in seen:
                continue
            seen.add(id(place.schema))
            yield place
            for word in ("allOf",) if always else _APPLIED:
                waiting += place.listed(word)
            if not always:
                waiting += [place.inside(place.schema[word]) for word in _APPLIED_IF if word in place.schema]
            waiting += self.referred(place, strict=False)

    def referred(self, place: Place, strict: bool = True) -> list[Place]:
        """Return the targets of a schema's own `$ref`, `$dynamicRef` and `$recursiveRef`, not those of references
        within its parts.

        strict: raise UnresolvedError for a reference without a target; otherwise such references are skipped.
        """
        found = []
        for word in REFERENCES:
            if word in place.schema:
                try:
                    found.append(self.resolve(place.schema[word], place.base))
                except UnresolvedError:
                    if strict:
                        raise
        return found

    @cached_property
    def _named(self) -> dict[str, Place]:
        """Parts of the document by `$id` (as an absolute URI) and by anchor (as URI#anchor). Of two parts with the same
        name, the first found counts.
        """
        named: dict[str, Place] = {}
        waiting = [self.root]
        while waiting:
            place = waiting.pop()
            if isinstance(place.schema, Mapping):
                if isinstance(own := place.schema.get("$id"), str):
                    named.setdefault(f"{place.base}{own}" if own.startswith("#") else place.base, place)
                for word in _ANCHORS:
                    if isinstance(anchor := place.schema.get(word), str):
                        named.setdefault(f"{place.base}#{anchor}", place)
                waiting += place.subschemas()
        return named


def _joined(base: str, uri: str) -> str:
    """Return `uri` resolved against `base`; `base` if `uri` is empty, and `uri` unchanged if it cannot be parsed."""
    try:
        return urljoin(base, uri) if uri else base
    except ValueError:
        return uri


def _pointed(place: Place, pointer: str) -> Place | None:
    """Follow a JSON pointer from a place; return the place it points to, None if it points nowhere."""
    for step in pointer.split("/")[1:]:
        found, key = place.schema, step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            place = place.inside(found[key])
        elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
            place = place.inside(found[int(key)])
        else:
            return None
    return place


def moved(place: Place, document: SchemaDocument, definitions: dict[str, Any]) -> Any:
    """Return a copy of a schema of `document` for use in another document; its references are rewritten as
    `#/$defs/NAME`.

    definitions: `$defs` of the other document, changed in place: copies of the references' targets are added under new
    names. `$defs`, anchors and `$id`s are not copied. Raises UnresolvedError for a reference that points to no schema.
    """
    mover = _Mover(document, definitions)
    copy = mover.copy(place)
    while mover.waiting:
        name, target = mover.waiting.pop()
        definitions[name] = mover.copy(target)
    return copy


def self_contained(document: SchemaDocument, *places: Place) -> dict[str, Any]:
    """Return one schema, with the definitions that it needs, that a value meets if it meets all of `places`, parts of
    `document`.

    Raises UnresolvedError for a reference that points to no schema.
    """
    definitions: dict[str, Any] = {}
    copies = [moved(place, document, definitions) for place in places]
    copy = copies[0] if len(copies) == 1 else {"allOf": copies}
    return with_definitions(copy if isinstance(copy, dict) else {}, definitions)


def with_definitions(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the schema with `definitions` as its `$defs`; the schema itself if `definitions` is empty."""
    return {**schema, "$defs": definitions} if definitions else schema


@dataclass
class _Mover:
    """Copier of schemas into another document.

    Attributes:
      document: document from which schemas are copied.
      definitions: `$defs` of the other document.
      waiting: (name in `definitions`, schema to copy there) for references that were rewritten and whose target is not
        copied yet.
      _names: name in `definitions` by id() of the schema.
    """

    document: SchemaDocument
    definitions: dict[str, Any]
    waiting: list[tuple[str, Place]] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def copy(self, place: Place, depth: int = 0) -> Any:
        """Return a copy of a schema with its references rewritten; each target is added to `waiting`. A value that is
        not an object, or is deeper than _MAX_DEPTH levels, is returned itself, uncopied. Raises UnresolvedError.
        """
        schema = place.schema
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return schema

        def inner(part: Any) -> Any:
            return self.copy(place.inside(part), depth + 1)

        copy = {word: value for word, value in schema.items() if word not in _NOT_MOVED}
        for word in SCHEMAS_BY_NAME:
            if word in copy and (named := mapping(schema, word)):
                copy[word] = {name: inner(part) for name, part in named.items()}
        for word in SCHEMAS:
            if isinstance(listed := schema.get(word), list):
                copy[word] = [inner(part) for part in listed]
        for word in SCHEMA:
            if isinstance(part := schema.get(word), Mapping):
                copy[word] = inner(part)
        for word in REFERENCES:
            # Within one document, a dynamic reference is the same as any other.
            if word in schema:
                target = self.document.resolve(copy.pop(word), place.base)
                copy["$ref" if word == "$ref" or "$ref" not in schema else word] = self._name(target)
        return copy

    def _name(self, target: Place) -> str:
        """Return the reference, in the new document, to a target. A target that is met for the first time gets a name
        and is added to `waiting`. Raises UnresolvedError if the target is not a schema.
        """
        if not isinstance(target.schema, Mapping | bool):
            raise UnresolvedError(f"a reference of the schema points to {type(target.schema).__name__}, not a schema")
        name = self._names.get(id(target.schema))
        if name is None:
            name = self._names[id(target.schema)] = str(len(self.definitions))
            self.definitions[name] = True  # reserves the name until the copy exists
            self.waiting.append((name, target))
        return f"#/$defs/{name}"
