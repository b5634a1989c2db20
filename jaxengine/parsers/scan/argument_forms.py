"""Forms of a function's arguments, for grammars in which a call has its arguments one by one, not as a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxengine.parsers.scan.call_grammar import Schema
from jaxengine.parsers.scan.typed_text import types_at
from jaxengine.schema_references import Place, SchemaDocument, mapping, self_contained

_MAX_FORMS = 64
_MAX_NESTING = 64


@dataclass(frozen=True)
class ArgumentForm:
    """One combination of the alternatives (anyOf, oneOf) of the schema of a function's arguments.

    Attributes:
      document: the schema.
      places: schemas of each parameter, all of which apply, in the order of the document.
      required: names of parameters that a call must have.
    """

    document: SchemaDocument
    places: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def joined(self, other: ArgumentForm) -> ArgumentForm:
        """Return a form with the parameters of this one and `other`: the places of both, without repeated schemas, and
        the union of the required names.
        """
        places = dict(self.places)
        for name, added in other.places.items():
            own = places.get(name, ())
            places[name] = (*own, *(each for each in added if all(each.schema is not one.schema for one in own)))
        return ArgumentForm(self.document, places, self.required | other.required)

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types of the parameter `name`. Raises KeyError for an unknown one."""
        return types_at(self.document, self.places[name])

    def texts(self, name: str) -> list[str]:
        """Return the texts that the parameter `name` may have: those in every enum and const of non-empty texts that
        applies to it, in the order of the last. [] if nothing restricts it, or if the restrictions have no text in
        common. Raises KeyError for an unknown parameter.
        """
        texts: list[str] | None = None
        for place in self.places[name]:
            for each in self.document.applicable(place, always=True):
                listed = each.schema.get("enum", [each.schema["const"]] if "const" in each.schema else None)
                if isinstance(listed, list) and all(isinstance(text, str) and text for text in listed):
                    texts = [text for text in listed if texts is None or text in texts]
        return texts or []

    def schema(self, name: str) -> dict[str, Any]:
        """Return the schema of the parameter `name` as a self-contained document. Raises KeyError for an unknown
        parameter, UnresolvedError for a reference that leads nowhere.
        """
        return self_contained(self.document, *self.places[name])


def argument_forms(function: Schema) -> list[ArgumentForm]:
    """Return the forms that a function's arguments may have, one for each combination of alternatives.

    function: JSON schema of the arguments, an object. Properties by reference, of allOf and of alternatives are
    included; conditions (if), patterns and alternatives that are not objects are left out. Raises ValueError for more
    than 64 combinations or levels, UnresolvedError for a reference that leads nowhere.
    """
    document = SchemaDocument(function)
    return _forms(document, document.root, {}, 0)


def _forms(
    document: SchemaDocument, place: Place, known: dict[int, list[ArgumentForm]], depth: int
) -> list[ArgumentForm]:
    """Return the forms of the schema at `place`, which is `depth` references and combinations below the root. A schema
    that is not a mapping (true, false, invalid) has one form, without parameters.

    known: forms by the id of their schema, to which this adds. A schema that contains itself contributes nothing where
    it recurs. Raises ValueError for more than 64 combinations or levels, UnresolvedError for a reference that leads
    nowhere.
    """
    schema = place.schema
    if not isinstance(schema, Mapping):
        return [ArgumentForm(document)]
    if depth > _MAX_NESTING:
        raise ValueError(f"the arguments of a function may be {_MAX_NESTING} references and combinations deep")
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = [ArgumentForm(document)]
    required = schema.get("required")
    names = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
    places = {name: (place.inside(each),) for name, each in mapping(schema, "properties").items()}
    forms = [ArgumentForm(document, places, frozenset(names))]
    for each in (*document.referred(place), *place.listed("allOf")):
        forms = _joined(forms, _forms(document, each, known, depth + 1))
    for word in ("anyOf", "oneOf"):
        branches = [each for each in place.listed(word) if _may_be_object(each.schema)]
        if branches:
            forms = _joined(forms, [form for each in branches for form in _forms(document, each, known, depth + 1)])
    known[id(schema)] = forms
    return forms


def _joined(forms: list[ArgumentForm], others: list[ArgumentForm]) -> list[ArgumentForm]:
    """Return every form of `forms` joined with every form of `others`. Raises ValueError for more than 64."""
    if len(forms) * len(others) > _MAX_FORMS:
        raise ValueError(f"the arguments of a function may have at most {_MAX_FORMS} combinations of alternatives")
    return [form.joined(other) for form in forms for other in others]


def _may_be_object(schema: Any) -> bool:
    """Return whether the schema allows objects by its type. One without "type" does, as does true."""
    kind = schema.get("type", "object") if isinstance(schema, Mapping) else "object"
    return kind == "object" or (isinstance(kind, list) and "object" in kind)
