"""/openapi.json and Allow say what the server really does."""

from __future__ import annotations

import pytest

from jaxengine.server.http.app import create_app
from jaxengine.server.options import ServerConfig
from tests.jaxengine.server.asgi_client import http_client


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name="tiny", api_key="right"))


async def get_document(app):
    async with http_client(app, "right") as client:
        return (await client.get("/openapi.json")).json()


async def test_errors_are_those_that_come(app):
    document = await get_document(app)
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    assert not [path for path, _, operation in operations if "422" in operation["responses"]]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    async with http_client(app) as client:
        for path, method, operation in operations:
            assert {"401", "500", "503"} <= operation["responses"].keys(), path
            if "requestBody" in operation:
                assert {"400", "413", "415", "429"} <= operation["responses"].keys(), path
            answer = await client.request(method, path.replace("{response_id}", "a").replace("{model}", "a"))
            shape = operation["responses"]["401"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if answer.status_code == 401:
                required = document["components"]["schemas"][shape]["required"]
                assert answer.json().keys() == set(required), path
    kinds = {
        path: operation["responses"]["200"]["content"]
        for path, _, operation in operations
        if "requestBody" in operation
    }
    assert "text/event-stream" in kinds["/v1/chat/completions"] and "text/event-stream" in kinds["/v1/messages"]
    assert "text/event-stream" not in kinds["/tokenize"]


async def test_methods_that_a_path_has_are_all_named(app):
    async with http_client(app, "right") as client:
        for path, methods in (
            ("/v1/responses/resp_a", "DELETE, GET"),
            ("/v1/chat/completions", "POST"),
            ("/ping", "GET, POST"),
        ):
            answer = await client.patch(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, methods), path
