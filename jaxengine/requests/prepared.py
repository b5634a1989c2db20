"""A request as it has been prepared for an engine: checked, tokenised, nothing queued yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.requests.sampling_params import SamplingParams
from scheduler.request import Request

Prompt = str | Mapping[str, Any]


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request that changed nothing yet."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    requests: list[Request]
