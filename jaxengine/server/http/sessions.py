"""DELETE /v1/sessions/{id}: drops the pages that a conversation keeps. A session belongs to the key that created it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.params.options import session_key
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import Answer, answers
from jaxengine.server.http.lists import there


class DroppedSession(Answer):
    id: str
    deleted: bool


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route DELETE /v1/sessions/{session_id}; a router without routes unless pages are also kept outside of
    the devices (kv_offloading_bytes).
    """
    routes = APIRouter(tags=["sessions"])
    if not engine.inputs.config.kv_offloading_bytes:
        return routes

    @routes.delete("/v1/sessions/{session_id}")
    @answers(DroppedSession)
    async def drop_session(session_id: str, request: Request) -> dict[str, Any]:
        """Drop the keys and values that the conversation alone keeps, on the devices and in the tiers. Returns its id,
        and `deleted`, true. session_id: the client's X-Session-Id. Raises ApiError (404) for a session that this client
        does not have, EngineDeadError.
        """
        owner = request.scope["state"]["owner_tag"]
        there(await engine.utility("drop_session", session_key(owner, session_id)) or None, "session", session_id)
        return {"id": session_id, "deleted": True}

    return routes
