"""References in JSON schemas: resolving them, and moving schemas into other documents.

A reference is relative to the document that contains it, so it would lose its target in another document. `moved`
copies a schema together with the targets of its references, which become definitions of the new document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

# Keywords whose value is an object of schemas by name, a list of schemas, or a schema. Values of other keywords are
# data or have no effect.
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
# Limit of the schemas that apply to one value, since schemas may refer to each other and to themselves.
_MAX_APPLICABLE = 256
# Copies of deeper schemas are incomplete. StructuredOutputsParams refuses schemas that are far less deep.
_MAX_DEPTH = 64
_INDEX = re.compile("[0-9]{1,9}")


class UnresolvedError(ValueError):
    """Error for a reference that points to nothing in its document, or to something that is not a schema."""


class Place(NamedTuple):
    """A part of a JSON schema document.

    Attributes:
      schema: the part, any JSON value.
      base: URI to which references in it are relative; "" without `$id`.
    """

    schema: Any
    base: str = ""

    def inside(self, schema: Any) -> Place:
        """Return `schema`, a part of this one, as a Place. Its base is its `$id`, resolved against this base; it is
        this base if it has no `$id` or one that is only a fragment.
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
        """Return the schemas in the list of the keyword `word`, such as "anyOf"; [] without such a list."""
        found = self.schema.get(word) if isinstance(self.schema, Mapping) else None
        return [self.inside(each) for each in found] if isinstance(found, list) else []


def mapping(schema: Any, word: str) -> Mapping[str, Any]:
    """Return the JSON object that is the value of the keyword `word` in a schema; {} if there is none."""
    found = schema.get(word) if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


class SchemaDocument:
    """A JSON schema document in which references can be resolved."""

    def __init__(self, root: Any):
        self.root = Place(None).inside(root)

    def resolve(self, reference: Any, base: str | None = None) -> Place:
        """Return the part to which a reference points. The reference is a JSON pointer ("#/properties/a"), an anchor
        ("#a"), or either of these after the `$id` of a part of the document.

        base: URI to which the reference is relative; None for the root's. Raises UnresolvedError if the reference is
        not a string or points to nothing.
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
        that it reaches through anyOf, oneOf, allOf, then, else and references. Each is yielded once, and at most
        _MAX_APPLICABLE are. Schemas that are not objects (true, false) and references without a target are skipped.

        always: yield only schemas that always apply, and so do not follow anyOf, oneOf, then and else.
        """
        pending, seen = [place], set[int]()
        while pending and len(seen) < _MAX_APPLICABLE:
            place = pending.pop(0)
            if not isinstance(place.schema, Mapping) or id(place.schema) in seen:
                continue
            seen.add(id(place.schema))
            yield place
            for word in ("allOf",) if always else _APPLIED:
                pending += place.listed(word)
            if not always:
                pending += [place.inside(place.schema[word]) for word in _APPLIED_IF if word in place.schema]
            pending += self.referred(place, strict=False)

    def referred(self, place: Place, strict: bool = True) -> list[Place]:
        """Return the targets of a schema's own `$ref`, `$dynamicRef` and `$recursiveRef`, but not of references in its
        parts. strict: whether a reference without a target raises UnresolvedError; otherwise it is skipped.
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
        """Parts of the document by `$id` (as an absolute URI) and by anchor (as URI#anchor). If two parts have the same
        name, the one that is found first counts.
        """
        named: dict[str, Place] = {}
        pending = [self.root]
        while pending:
            place = pending.pop()
            if isinstance(place.schema, Mapping):
                if isinstance(own := place.schema.get("$id"), str):
                    named.setdefault(f"{place.base}{own}" if own.startswith("#") else place.base, place)
                for word in _ANCHORS:
                    if isinstance(anchor := place.schema.get(word), str):
                        named.setdefault(f"{place.base}#{anchor}", place)
                pending += place.subschemas()
        return named


def _joined(base: str, uri: str) -> str:
    """Return `uri` resolved against `base`; `base` if `uri` is empty, and `uri` unchanged if it cannot be parsed."""
    try:
        return urljoin(base, uri) if uri else base
    except ValueError:
        return uri


def _pointed(place: Place, pointer: str) -> Place | None:
    """Follow a JSON pointer from a place, and return the place to which it points; None if it points to nothing."""
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
    """Return a copy of a schema of `document` for another document, with its references rewritten as `#/$defs/NAME`.

    definitions: `$defs` of the other document, to which copies of the references' targets are added under new names.
    `$defs`, anchors and `$id`s are not copied. Raises UnresolvedError for a reference that does not point to a schema.
    """
    mover = _Mover(document, definitions)
    copy = mover.copy(place)
    while mover.pending:
        name, target = mover.pending.pop()
        definitions[name] = mover.copy(target)
    return copy


def self_contained(document: SchemaDocument, *places: Place) -> dict[str, Any]:
    """Return a schema, with the definitions that it needs, that is equivalent to all of `places`, parts of `document`,
    together. Raises UnresolvedError for a reference that does not point to a schema.
    """
    definitions: dict[str, Any] = {}
    copies = [moved(place, document, definitions) for place in places]
    copy = copies[0] if len(copies) == 1 else {"allOf": copies}
    return with_definitions(copy if isinstance(copy, dict) else {}, definitions)


def with_definitions(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the schema whose `$defs` are `definitions`; the schema itself if `definitions` is empty."""
    return {**schema, "$defs": definitions} if definitions else schema


@dataclass
class _Mover:
    """Copier of schemas into another document.

    Attributes:
      document: document from which schemas are copied.
      definitions: `$defs` of the other document.
      pending: (name in `definitions`, schema to copy there) for rewritten references whose target is not copied yet.
      _names: name in `definitions` by id() of the schema.
    """

    document: SchemaDocument
    definitions: dict[str, Any]
    pending: list[tuple[str, Place]] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def copy(self, place: Place, depth: int = 0) -> Any:
        """Return a copy of a schema with its references rewritten, and add their targets to `pending`. A value that is
        not an object or is deeper than _MAX_DEPTH levels is returned without a copy. depth: levels above `place`.
        Raises UnresolvedError.
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
            # Within one document, a dynamic reference is equivalent to any other.
            if word in schema:
                target = self.document.resolve(copy.pop(word), place.base)
                copy["$ref" if word == "$ref" or "$ref" not in schema else word] = self._name(target)
        return copy

    def _name(self, target: Place) -> str:
        """Return the reference to a target in the new document. A new target gets a name and is added to `pending`.
        Raises UnresolvedError if the target is not a schema.
        """
        if not isinstance(target.schema, Mapping | bool):
            raise UnresolvedError(f"a reference of the schema points to {type(target.schema).__name__}, not a schema")
        name = self._names.get(id(target.schema))
        if name is None:
            name = self._names[id(target.schema)] = str(len(self.definitions))
            self.definitions[name] = True  # reserves the name until the copy exists
            self.pending.append((name, target))
        return f"#/$defs/{name}"
