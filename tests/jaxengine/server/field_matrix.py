"""Every field of a request acts or is refused: what a request with a field changes, compared to one without."""

from __future__ import annotations

import logging
import re
from typing import Any

from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.scripted_engine import ScriptedEngine

_NEW_IDS = re.compile(r"[0-9a-f]{8,}|(created(_at)?\": )\d+")


async def outcome(app: Any, engine: ScriptedEngine, path: str, fields: dict[str, Any], caplog: Any) -> str:
    """All that can be seen of a request: what the engine is asked, what is answered, what is logged of it."""
    engine.calls.clear()
    engine.sessions.clear()
    with caplog.at_level(logging.DEBUG, "jaxengine"):
        caplog.clear()
        answer = await post(app, path, **fields)
    assert answer.status == 200, (fields, answer.body)
    calls = [
        (prompt, params, priority, timeout and round(timeout)) for prompt, params, _, priority, timeout in engine.calls
    ]
    # Of a stream: how it is cut is seen, too.
    return _NEW_IDS.sub("*", repr((calls, engine.sessions, answer.body.decode(), caplog.messages)))


async def check_acts(
    app: Any, engine: ScriptedEngine, path: str, base: dict[str, Any], name: str, value: Any, caplog: Any
) -> None:
    """The request with the field is another one than without, and the same one with None for it."""
    plain = await outcome(app, engine, path, base, caplog)
    assert await outcome(app, engine, path, {**base, name: value}, caplog) != plain, name
    if name not in base:
        assert await outcome(app, engine, path, {**base, name: None}, caplog) == plain, name


async def check_refused(app: Any, path: str, base: dict[str, Any], name: str, neutral: tuple[Any, ...]) -> None:
    """Whatever asks for something is refused by name; what asks for nothing is taken."""
    for value in (True, 7, "x", [1], {"a": 1}):
        answer = await post(app, path, **base, **{name: value})
        if not any(type(value) is type(one) and value == one for one in neutral):
            assert answer.status == 400 and answer.error["param"] == name, (name, value, answer.body)
            assert name in answer.error["message"]
    for value in (None, *neutral):
        answer = await post(app, path, **base, **{name: value})
        assert answer.status == 200, (name, value, answer.body)
        assert "x-unknown-fields" not in answer.headers
