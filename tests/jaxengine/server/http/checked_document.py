"""Answers held to what /openapi.json says of them."""

from __future__ import annotations

import json

import jsonschema


class Checked:
    """A document whose objects have no other fields than those it names; notes which answers were held to it."""

    def __init__(self, document):
        self._document = json.loads(json.dumps(document))
        _close(self._document["components"])
        self.seen = set()

    def check(self, method, path, kind, values):
        answer = self._document["paths"][path][method]["responses"]["200"]["content"][kind]
        rules = jsonschema.Draft202012Validator({**answer["schema"], "components": self._document["components"]})
        for value in values:
            if error := jsonschema.exceptions.best_match(rules.iter_errors(value)):
                raise AssertionError(f"{path} {kind}: {error.json_path}: {error.message}")
        self.seen.add((method, path, kind))


def _close(schema):
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            _close(part)
    elif isinstance(schema, list):
        for part in schema:
            _close(part)
