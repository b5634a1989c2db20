"""The page at /docs: what the server's routes take and answer, with a form to try each.

One file without anything from elsewhere, made in the browser from /openapi.json. Like the page at / it is the same for
everyone and asks for a key itself.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.observe.status import page_headers
from jaxengine.server.options import ServerConfig


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    routes = APIRouter()
    page = resources.files("jaxengine.server.observe").joinpath("docs.html").read_text("utf-8")
    headers = page_headers(page)

    @routes.get("/docs", include_in_schema=False)
    async def docs_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return routes
