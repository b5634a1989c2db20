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
        """Return the form of arguments to which this one and `other` apply: all places, each schema once, and all
        required names.
        """
        places = dict(self.places)
        for name, added in other.places.items():
            own = places.get(name, ())
            places[name] = (*own, *(each for each in added if all(each.schema is not one.schema for one in own)))
        return ArgumentForm(self.document, places, self.required | other.required)

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types of a parameter. Raises KeyError for an unknown one."""
        return types_at(self.document, self.places[name])

    def texts(self, name: str) -> list[str]:
        """Return the texts that a parameter may have as its value: those that every enum and const of texts for it
        lists; [] if none restricts it.
        """
        texts: list[str] | None = None
        for place in self.places[name]:
            for each in self.document.applicable(place, always=True):
                listed = each.schema.get("enum", [each.schema["const"]] if "const" in each.schema else None)
                if isinstance(listed, list) and all(isinstance(text, str) and text for text in listed):
                    texts = [text for text in listed if texts is None or text in texts]
        return texts or []

    def schema(self, name: str) -> dict[str, Any]:
        """Return the schema of a parameter, as a document of its own. Raises UnresolvedError for a reference to
        nowhere.
        """
        return self_contained(self.document, *self.places[name])


def argument_forms(function: Schema) -> list[ArgumentForm]:
    """Return the forms that a function's arguments may have, one for each combination of alternatives.

    function: JSON schema of the arguments, an object. Properties by reference, of allOf and of alternatives are
    included; conditions (if), patterns and alternatives that are no objects are not. Raises ValueError for too many
    alternatives or levels, UnresolvedError for a reference to nowhere.
    """
    document = SchemaDocument(function)
    return _forms(document, document.root, {}, 0)


def _forms(
    document: SchemaDocument, place: Place, known: dict[int, list[ArgumentForm]], depth: int
) -> list[ArgumentForm]:
    """Return the forms of the schema at `place`, `depth` references and combinations below the root; one without
    parameters for true, false and what is no schema.

    known: forms found so far by the id of their schema, to which this adds. A schema that contains itself adds nothing
    where it comes again. Raises ValueError for too many alternatives or levels, UnresolvedError for a reference to
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
    """Return each form of one list joined with each of the other. Raises ValueError for more than 64."""
    if len(forms) * len(others) > _MAX_FORMS:
        raise ValueError(f"the arguments of a function may have at most {_MAX_FORMS} combinations of alternatives")
    return [form.joined(other) for form in forms for other in others]


def _may_be_object(schema: Any) -> bool:
    """Whether a schema's type, "object" if it names none, allows objects."""
    kind = schema.get("type", "object") if isinstance(schema, Mapping) else "object"
    return kind == "object" or (isinstance(kind, list) and "object" in kind)
