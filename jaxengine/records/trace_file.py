"""jaxengine's own form of traces: JSON lines, a header and then one for each request, without text and token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
      arrival: seconds since the trace began.
      num_prompt, num_output: numbers of tokens.
      max_tokens: the caller's limit; None: num_output, as the request ended by it.
      hash_ids: ids of its blocks, of prompt and output together, as far as the trace has them. Equal ids stand for
        equal tokens up to the end of the block.
    """

    arrival: float
    num_prompt: int
    num_output: int
    max_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()

    @property
    def limit(self) -> int:
        """Largest number of output tokens that the request may get: max_tokens, or num_output if that is None."""
        return self.num_output if self.max_tokens is None else self.max_tokens


def header_line(block_size: int) -> str:
    """Return the first line of a trace, a JSON object with the format's version, with its end of line.

    block_size: tokens of a block of `hash_ids`.
    """
    return json.dumps({"jaxengine_trace": VERSION, "block_size": block_size}) + "\n"


def request_line(request: TraceRequest) -> str:
    """Return the JSON line of a request, with its end of line.

    The keys are "arrival" (seconds, rounded to microseconds), "prompt_tokens", "output_tokens", "max_tokens" (left out
    if None) and "hash_ids".
    """
    line: dict[str, Any] = {"arrival": round(request.arrival, 6)}
    line |= {"prompt_tokens": request.num_prompt, "output_tokens": request.num_output}
    if request.max_tokens is not None:
        line["max_tokens"] = request.max_tokens
    return json.dumps({**line, "hash_ids": list(request.hash_ids)}) + "\n"
