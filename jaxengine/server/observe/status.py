"""Page at / with its data, /status.json; and /trace, the engine's timeline.

The page is one file without external resources and without data, so it needs no key; it prompts for one if the server
has keys.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from importlib import resources
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.adapters.owned_ids import Viewer
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.observe.chrome_trace import chrome_trace
from jaxengine.version import __version__

MAX_TRACE_SECONDS = 600.0


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes / (the page), /status.json and /trace."""
    routes = APIRouter(tags=["operations"])
    model = served_names(engine, config)[0]
    page = resources.files("jaxengine.server.observe").joinpath("status.html").read_text("utf-8")
    headers = page_headers(page)

    @routes.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        """Return the page."""
        return HTMLResponse(page, headers=headers)

    @routes.get("/status.json")
    async def status(request: Request) -> dict[str, Any]:
        """Return the state of the engine, the fields of its utility "status", with the model's name as `model` and the
        server's `version`, for the page at /. Requests of other keys have numbers for ids. Raises EngineDeadError if
        the engine cannot answer.
        """
        shown = Viewer(request.state.sees).status(await engine.utility("status"))
        return {"model": model, "version": __version__, **shown}

    @routes.get("/trace", response_class=Response)
    async def trace(
        request: Request,
        seconds: Annotated[float, Query(gt=0, le=MAX_TRACE_SECONDS, allow_inf_nan=False)] = 10.0,
    ) -> Response:
        """Return the last `seconds` of the engine's steps and requests, for ui.perfetto.dev.

        Requests of other keys have numbers in place of their ids. Raises EngineDeadError if the engine cannot answer.
        """
        viewer = Viewer(request.state.sees)
        timeline = await engine.utility("trace", seconds)
        text = [span for span in engine.text_spans() if span[0] >= timeline["since"]]
        # Off the event loop, since it may take as long as many steps.
        body = await asyncio.to_thread(
            lambda: msgspec.json.encode(chrome_trace(viewer.timeline(timeline), text, model))
        )
        return Response(body, media_type="application/json")

    return routes


def page_headers(page: str) -> dict[str, str]:
    """Return response headers that allow a page only its own script and style, and requests to its own server.

    page: HTML with one <script> and one <style>, both without attributes.
    """

    def digest(tag: str) -> str:
        """Return the hash of the tag's content in the format of a Content-Security-Policy."""
        content = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert content is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
