"""JSON schemas as people's tools write them, made fit for a grammar: what a grammar cannot say is said in another way.

Whatever keeps to the schema that comes out keeps to the one that went in, but for what `lenient` leaves out and for
formats that nobody enforces, which the standard calls annotations (JSON Schema 2020-12, Validation, section 7.2.1).
Knows nothing of tokens or of how grammars are compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Formats that the grammar enforces, by llguidance's documentation.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMA = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems") + (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)
# Look-around, word borders and back references: what no automaton of the grammar's has.
_BEYOND_REGULAR = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[bB1-9]")
# A uuid of one version, by the format names that pydantic gives.
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
# Of formats that names of properties have; not every day of a month, but none that a month has not.
_KEY_PATTERNS = {
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}


def fit_for_grammar(text: str, lenient: bool) -> str:
    """The schema as text; lenient: a pattern that no grammar can follow is left out."""
    if not any(f'"{word}"' in text for word in ("format", "pattern", "propertyNames")):
        return text
    schema = json.loads(text)
    return json.dumps(_Fitting(schema, lenient).schema(schema), ensure_ascii=False, separators=(",", ":"))


class _Fitting:
    def __init__(self, root: Any, lenient: bool):
        self._root = root
        self._lenient = lenient

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        fitted = dict(schema)
        for word in _SCHEMAS_BY_NAME:
            if isinstance(fitted.get(word), dict):
                fitted[word] = {name: self.schema(each) for name, each in fitted[word].items()}
        for word in _SCHEMA:
            if isinstance(fitted.get(word), dict):
                fitted[word] = self.schema(fitted[word])
        if isinstance(fitted.get("anyOf"), list):
            # Without a branch that cannot be followed there is less to choose from, and all of it is right.
            fitted["anyOf"] = [each for each in fitted["anyOf"] if not _is_beyond(each)] or fitted["anyOf"]
        for word in _SCHEMAS:
            if isinstance(fitted.get(word), list):
                fitted[word] = [self.schema(each) for each in fitted[word]]
        if self._lenient and _is_beyond(fitted):
            del fitted["pattern"]
        self._fit_format(fitted)
        if "propertyNames" in fitted:
            self._fit_names(fitted)
        return fitted

    def _fit_format(self, schema: dict[str, Any]) -> None:
        given = schema.get("format")
        if given is None or given in _FORMATS:
            return
        del schema["format"]
        version = re.fullmatch("uuid([1-8])", str(given))
        if version is not None and "pattern" not in schema:
            schema["pattern"] = _UUID.format(version.group(1))

    def _fit_names(self, schema: dict[str, Any]) -> None:
        """Names that a pattern or a list can say become the names of properties; others are left as they are."""
        names = self._resolved(schema["propertyNames"])
        rules = names.keys() - {"type", "title", "description", "$schema"} if isinstance(names, dict) else None
        if names is True or rules == set():
            del schema["propertyNames"]
        elif rules is None or "properties" in schema or "patternProperties" in schema:
            return
        elif rules == {"const"} or (rules == {"enum"} and isinstance(names["enum"], list)):
            allowed = names["enum"] if "enum" in names else [names["const"]]
            value = schema.get("additionalProperties", True)
            del schema["propertyNames"]
            schema["properties"] = {name: value for name in allowed if isinstance(name, str)}
            schema["additionalProperties"] = False
        elif (pattern := _name_pattern(names, rules)) is not None:
            value = schema.get("additionalProperties", True)
            del schema["propertyNames"]
            schema["patternProperties"] = {pattern: value}
            schema["additionalProperties"] = False

    def _resolved(self, schema: Any) -> Any:
        """The schema behind a reference to a definition of the root's."""
        reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        place = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference) if isinstance(reference, str) else None
        if place is None or not isinstance(self._root, dict):
            return schema
        found = self._root.get(place.group(1))
        return found.get(place.group(2), schema) if isinstance(found, dict) else schema


def _is_beyond(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _BEYOND_REGULAR.search(pattern) is not None


def _name_pattern(names: dict[str, Any], rules: Any) -> str | None:
    """One pattern for what the schema of a name allows, or None."""
    if rules == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if rules == {"format"}:
        return _KEY_PATTERNS.get(str(names["format"]))
    if rules <= {"minLength", "maxLength"} and all(type(names[rule]) is int for rule in rules):
        return f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None
