"""/openapi.json as the server really answers: its errors in their shapes, streams beside whole answers.

Knows the routes of an application, nothing of what they do.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_TEXT = {"type": "string"}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": "integer"},
    },
}
_ANTHROPIC_ERROR = {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}}
_SCHEMAS = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": _OPENAI_ERROR}},
    "MessagesError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": _ANTHROPIC_ERROR},
    },
}
# Status -> what it means, for every route, and for those that read a body besides.
_ALWAYS = {
    "401": "No valid key was presented.",
    "431": "The headers are too large.",
    "500": "A fault of the server's.",
    "503": "The engine cannot answer at the moment, or the server is about to end.",
}
_WITH_BODY = {
    "400": "A field is wrong; the message says which and what is allowed.",
    "404": "There is no such model, or nothing stored under that id.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too many requests wait; Retry-After says when to come again.",
}


def install(app: FastAPI) -> None:
    """Has the application's document written by these rules."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            _correct(plain())
        return plain()

    app.openapi = document


def _correct(document: dict[str, Any]) -> None:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(_SCHEMAS)
    for path, methods in document["paths"].items():
        shape = "MessagesError" if path.startswith("/v1/messages") else "Error"
        for operation in methods.values():
            _correct_operation(operation, schemas, shape)


def _correct_operation(operation: dict[str, Any], schemas: dict[str, Any], shape: str) -> None:
    answers = operation["responses"]
    refuses = answers.pop("422", None) is not None or "requestBody" in operation
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    for status, meaning in {**_ALWAYS, **(_WITH_BODY if refuses else {})}.items():
        answers.setdefault(status, {"description": meaning, "content": content})
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = schemas.get(body.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
    if "requestBody" in operation:
        answers["200"]["content"] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in fields:
        answers["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
