"""Page at /docs: parameters and answers of the server's routes, with a form to try each route.

One file without external resources, which reads /openapi.json and prompts for a key itself.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.observe.status import page_headers


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /docs, or none with disable_fastapi_docs. The page is read from the package now."""
    routes = APIRouter()
    if config.disable_fastapi_docs:
        return routes
    page = resources.files("jaxengine.server.observe").joinpath("docs.html").read_text("utf-8")
    headers = page_headers(page)

    @routes.get("/docs", include_in_schema=False)
    async def docs_page() -> HTMLResponse:
        """Return the page."""
        return HTMLResponse(page, headers=headers)

    return routes
