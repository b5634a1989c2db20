"""Rewriting of JSON schemas for the grammar compiler, which expresses unsupported keywords in other ways.

Instances of the result are instances of the original schema, except for what `lenient` drops and for unsupported
formats, which the standard calls annotations (JSON Schema 2020-12, Validation, section 7.2.1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxengine.schema_references import SCHEMA, SCHEMAS, SCHEMAS_BY_NAME, SchemaDocument, UnresolvedError

# Formats that the grammar enforces, by llguidance's documentation.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Look-around, word boundaries and back references, which the grammar's automata do not support.
_BEYOND_REGULAR = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[bB1-9]")
# A uuid of one version, pydantic's format names "uuid1" to "uuid8".
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
# Patterns for formats of property names; the date pattern omits the days 29 to 31, which not every month has.
_KEY_PATTERNS = {
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}


def fit_for_grammar(text: str, lenient: bool) -> str:
    """Rewrite a schema for the grammar compiler, from JSON text to JSON text.

    lenient: drop patterns that no grammar supports; otherwise they stay, and the compiler refuses them. Text without a
    format, pattern or propertyNames is returned unchanged. Raises ValueError for text that is not JSON.
    """
    if not any(f'"{word}"' in text for word in ("format", "pattern", "propertyNames")):
        return text
    schema = json.loads(text)
    return json.dumps(_Fitting(schema, lenient).schema(schema), ensure_ascii=False, separators=(",", ":"))


class _Fitting:
    """Rewriter of the parts of one schema. References are looked up in its root."""

    def __init__(self, root: Any, lenient: bool):
        self._document = SchemaDocument(root)
        self._lenient = lenient

    def schema(self, schema: Any) -> Any:
        """Return a copy of a subschema, rewritten with all its parts: formats and propertyNames are replaced or
        dropped, branches of anyOf with unsupported patterns are dropped if others remain, and with `lenient` other
        unsupported patterns too. A value other than a dict is returned unchanged.
        """
        if not isinstance(schema, dict):
            return schema
        fitted = dict(schema)
        for word in SCHEMAS_BY_NAME:
            if isinstance(fitted.get(word), dict):
                fitted[word] = {name: self.schema(each) for name, each in fitted[word].items()}
        for word in SCHEMA:
            if isinstance(fitted.get(word), dict):
                fitted[word] = self.schema(fitted[word])
        if isinstance(fitted.get("anyOf"), list):
            # Dropping unsupported branches only narrows the choice.
            fitted["anyOf"] = [each for each in fitted["anyOf"] if not _is_beyond(each)] or fitted["anyOf"]
        for word in SCHEMAS:
            if isinstance(fitted.get(word), list):
                fitted[word] = [self.schema(each) for each in fitted[word]]
        if self._lenient and _is_beyond(fitted):
            del fitted["pattern"]
        self._fit_format(fitted)
        if "propertyNames" in fitted:
            self._fit_names(fitted)
        return fitted

    def _fit_format(self, schema: dict[str, Any]) -> None:
        """Delete a format that the grammar does not enforce, in place; uuid1 to uuid8 become a pattern unless the
        schema has one.
        """
        given = schema.get("format")
        if given is None or given in _FORMATS:
            return
        del schema["format"]
        version = re.fullmatch("uuid([1-8])", str(given))
        if version is not None and "pattern" not in schema:
            schema["pattern"] = _UUID.format(version.group(1))

    def _fit_names(self, schema: dict[str, Any]) -> None:
        """Rewrite propertyNames, in place, as properties or patternProperties if possible. Delete it if it restricts
        nothing; leave it otherwise, and in a schema that has properties or patternProperties.

        The new properties have the schema of additionalProperties, which becomes False. Names that are no strings are
        dropped.
        """
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
        """Return the schema that a schema with only a $ref points to; other schemas, and references that lead nowhere,
        are returned unchanged.
        """
        if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
            return schema
        try:
            return self._document.resolve(schema["$ref"]).schema
        except UnresolvedError:
            return schema


def _is_beyond(schema: Any) -> bool:
    """Return whether a schema has a pattern with look-around, word boundaries or back references."""
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _BEYOND_REGULAR.search(pattern) is not None


def _name_pattern(names: dict[str, Any], rules: Any) -> str | None:
    """Return a pattern that matches only names allowed by `names`, a schema of property names; None if that is not
    supported.

    rules: the keywords of `names` that restrict a name. Supported are a pattern alone, a known format alone, and
    lengths alone.
    """
    if rules == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if rules == {"format"}:
        return _KEY_PATTERNS.get(str(names["format"]))
    if rules <= {"minLength", "maxLength"} and all(type(names[rule]) is int for rule in rules):
        return f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None
