"""Document /openapi.json with the types of all actual responses: complete ones, events, and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import BaseRoute

from jaxengine.server.http.answer.answers import CohereError, Error, MessagesError

# Status -> meaning, for every route, and in addition for routes that read a body or parameters.
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
# Beginning of paths -> type of their errors, where it is not OpenAI's.
_ERRORS = {"/v1/messages": MessagesError, "/cohere/": CohereError}
# Part of a route's docstring that its description leaves out: from "Raises" to the end of the paragraph.
_RAISES = re.compile(r"\s*\bRaises\s.*?(?=\n\n|\Z)", re.DOTALL)
_REF = "#/components/schemas/{model}"
_OF_EVENTS = "Server-sent events. The schema is of the JSON that the data of each is; OpenAI's streams end with [DONE]."


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Replace the application's OpenAPI document by one with the types of all responses. routes: all routes of the
    application.

    The document is made at the first request for it, which raises TypeError if a request type and an answer type share
    a name.
    """
    plain = app.openapi

    def document() -> dict[str, Any]:
        """Return the document, see `install`."""
        if app.openapi_schema is None:
            _correct(plain(), [route for route in routes if isinstance(route, APIRoute)])
        return plain()

    app.openapi = document


def _correct(document: dict[str, Any], routes: Sequence[APIRoute]) -> None:
    """Add the types of all responses, errors included, to the framework's document, in place. Remove the framework's
    schemas of validation errors, and from descriptions the sentences about Python exceptions.

    Raises TypeError if a request type and an answer type share a name.
    """
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    kinds = [kind for route in routes for kind in _kinds(route) if kind is not None]
    adapters: list[tuple[Any, Literal["validation"], TypeAdapter[Any]]] = [
        (kind, "validation", TypeAdapter(kind)) for kind in dict.fromkeys((Error, *_ERRORS.values(), *kinds))
    ]
    found, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    named: dict[Any, dict[str, Any]] = {kind: schema for (kind, _), schema in found.items()}
    if clash := definitions["$defs"].keys() & schemas.keys():
        raise TypeError(f"{sorted(clash)} are names of requests and of answers; give them others")
    schemas.update(definitions["$defs"])
    for path, methods in document["paths"].items():
        kind = next((kind for beginning, kind in _ERRORS.items() if path.startswith(beginning)), Error)
        error = named[kind]
        for operation in methods.values():
            _add_errors(operation, error)
            operation["description"] = _RAISES.sub("", operation.get("description", "")).strip()
    for route in routes:
        if not route.include_in_schema:
            continue
        whole, event = _kinds(route)
        for method in route.methods or () if whole is not None else ():
            answer = document["paths"][route.path_format][method.lower()]["responses"]["200"]
            answer["content"] = {"application/json": {"schema": named[whole]}}
            if event is not None:
                answer["content"]["text/event-stream"] = {"schema": {**named[event], "description": _OF_EVENTS}}


def _kinds(route: APIRoute) -> tuple[Any, Any]:
    """Return the types that the decorator `answers` has recorded for the route's complete response and for its events;
    None for a type that was not recorded.
    """
    return getattr(route.endpoint, "answers", (None, None))


def _add_errors(operation: dict[str, Any], error: dict[str, Any]) -> None:
    """Add the error responses to an operation, in place, and remove the framework's 422 response.

    Responses of _WITH_BODY are added only if the operation reads a body or parameters. A status that the operation
    already describes keeps its description. error: schema of an error's body.
    """
    answers = operation["responses"]
    refuses = answers.pop("422", None) is not None or "requestBody" in operation
    for status, meaning in {**_ALWAYS, **(_WITH_BODY if refuses else {})}.items():
        answers.setdefault(status, {"description": meaning, "content": {"application/json": {"schema": error}}})
