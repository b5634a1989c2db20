"""How a request ends that its last token ended."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.request import NOT_FINITE, FinishReason, Request


class End(NamedTuple):
    """A request that its last token ended, and why."""

    request: Request
    reason: FinishReason
    stop_reason: int | str | None = None

    @classmethod
    def by(cls, request: Request, token: int, stopped: bool) -> End:
        """The end that a token brings; stopped: it is one of those that stop the request; below 0: it was none."""
        if token < 0:
            return cls(request, FinishReason.ERROR, NOT_FINITE)
        if stopped:
            return cls(request, FinishReason.STOP, None if token in request.eos_token_ids else token)
        return cls(request, FinishReason.LENGTH)
