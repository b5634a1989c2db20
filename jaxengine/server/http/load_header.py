"""ORCA's load report in the headers of an answer, by which proxies balance: request and response headers are vLLM's."""

from __future__ import annotations

import json

from fastapi import Request, Response

from jaxengine.api.engine_client import EngineClient

# Header of a request that asks for the report, and of the answer that has it.
_ASKED, _GIVEN = "endpoint-load-metrics-format", "endpoint-load-metrics"


async def with_load(engine: EngineClient, request: Request, response: Response) -> Response:
    """Return `response` itself. If the request has endpoint-load-metrics-format TEXT or JSON, in any case, first add a
    header with the engine's load to it: kv_cache_usage_perc, the fraction of KV pages in use, and num_requests_waiting,
    as floats.

    Other values of that header are ignored, as it belongs to proxies. Raises EngineDeadError if the engine cannot
    answer.
    """
    form = request.headers.get(_ASKED, "").upper()
    if form not in ("TEXT", "JSON"):
        return response
    status = await engine.utility("status")
    load = {
        "kv_cache_usage_perc": float(status["kv_usage"]),
        "num_requests_waiting": float(status["num_waiting"]),
    }
    text = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
    response.headers[_GIVEN] = f"{form} {text if form == 'TEXT' else json.dumps({'named_metrics': load})}"
    return response
