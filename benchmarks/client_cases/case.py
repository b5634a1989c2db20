"""The task that every client is given, and the reporting of its cases. Runs with the client's packages; imports nothing
of jaxengine.

A script defines `async def` functions named after columns of the table, which raise when something is wrong, and ends
with `report(globals())`, which prints one line of JSON for each column.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import traceback
from typing import Any, Literal

import pydantic

# Of the server: its URL, a key, a model, the address of gRPC and its .proto. And a file of benchmarks.client_scores.
BASE, KEY, MODEL, GRPC, PROTO, SCORES = sys.argv[1:7]
COLUMNS = (
    "chat",
    "stream",
    "tools",
    "streamed_tools",
    "structured",
    "second_turn",
    "tools_and_schema",
    "scores",
    "load",
    "any_request",
)
QUESTION = "What is the weather in Paris? Answer in a few words."
SECONDS = 900.0


class Place(pydantic.BaseModel):
    """Arguments of the tool `get_weather`. They are short, so that a small model completes them quickly."""

    city: Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


class Weather(pydantic.BaseModel):
    """Schema of structured answers: a city, its temperature in degrees from 0 to 40, and whether it rains."""

    city: Literal["Paris", "Rome"]
    degrees: int = pydantic.Field(ge=0, le=40)
    rain: bool


def get_weather(city: Literal["Paris", "Rome"], days: int = 1) -> str:
    """Return a sentence with a fixed weather for `city` and `days`. It is the tool that clients offer to the model."""
    return f"{city}: 20 degrees and no rain, for {days} days"


def report(module: dict[str, Any]) -> None:
    """Run a script's cases one after the other and print lines of JSON: first the client's versions, then each case's
    outcome.

    module: globals() of the script, with PACKAGES and the functions named in COLUMNS; cases run in the order of
    COLUMNS. A case that raises, or that takes more than SECONDS, is reported as failed and its traceback goes to
    stderr.
    """
    names = module["PACKAGES"]
    versions = {name: importlib.metadata.version(name) for name in names}
    print(json.dumps({"client": " + ".join(f"{name} {version}" for name, version in versions.items())}), flush=True)
    asyncio.run(_run({column: module[column] for column in COLUMNS if column in module}))


async def _run(cases: dict[str, Any]) -> None:
    """Run each case, an async function by its column, and print {"case", "ok", "why" if it failed} as a line of JSON
    after it.
    """
    for column, case in cases.items():
        try:
            await asyncio.wait_for(case(), SECONDS)
            line = {"case": column, "ok": True}
        except BaseException as error:
            traceback.print_exc()
            line = {"case": column, "ok": False, "why": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(line), flush=True)
