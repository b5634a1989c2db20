"""Options of a request that concern neither its prompt nor its sampling: when it runs, and for whom.

Everything between the caller and the engine passes a RequestOptions on unchanged.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from jaxengine.requests.params.prepared import Prompt, is_token_ids
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError, invalid, plain_scalar, refuse, show_value

MAX_CLIENT_LENGTH = 256
# Range of the scheduler's columns and of messages between processes.
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1
SESSION = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# About thirty years, in seconds.
MAX_TIMEOUT = 1e9


@dataclass(frozen=True)
class RequestOptions:
    """How a request is scheduled. Checked when the request is prepared.

    Attributes:
      priority: smaller runs first, a 64-bit int; needs scheduling_policy="priority".
      timeout: seconds after arrival at which the request is aborted; None for no limit.
      client: name of the client; needs scheduling_policy="fair". Requests with None count as one client.
      arrival: time of arrival, in seconds of this machine's time.monotonic; default: when the options are created.
      lora: name of a loaded adapter; needs enable_lora. None for the base model.
      owner: owner of the API key that the request came with, so that two owners may use the same request id. Empty
        without keys.
      session: name of the conversation that the request belongs to, among those of its owner; None for none. See
        docs/kv_offload.md.
    """

    priority: int = 0
    timeout: float | None = None
    client: str | None = None
    arrival: float = field(default_factory=time.monotonic, compare=False)
    lora: str | None = None
    owner: str = ""
    session: str | None = None

    def __post_init__(self):
        if type(self.priority) is not int:
            object.__setattr__(self, "priority", plain_scalar(self.priority))

    def verify_against(self, scheduling_policy: str, enable_lora: bool) -> None:
        """Raise RequestError for an option that is invalid or that this engine would ignore: a priority (other than 0)
        or a client that scheduling_policy does not use, or an adapter without enable_lora. The error names the field
        and what is allowed.
        """
        if type(self.priority) is not int or not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise refuse("priority", self.priority, "an int of 64 bits")
        timeout = self.timeout
        if timeout is not None and not (
            type(timeout) in (int, float) and (0 < timeout <= MAX_TIMEOUT or timeout == math.inf)
        ):
            raise refuse("timeout", timeout, f"a number above 0, at most {MAX_TIMEOUT:.0f} seconds")
        if self.priority and scheduling_policy != "priority":
            text = f"priority is {self.priority}; it needs scheduling_policy='priority'"
            raise RequestError(text, param="priority", value=self.priority)
        if self.lora is not None and not (enable_lora and isinstance(self.lora, str)):
            text = f"lora is {show_value(self.lora)}; it must be the name of an adapter, and needs enable_lora"
            raise RequestError(text, param="lora", value=self.lora)
        if self.session is not None:
            check_session("session_id", self.session)
        client = self.client
        if client is None:
            return
        if not (isinstance(client, str) and 1 <= len(client) <= MAX_CLIENT_LENGTH and client.isprintable()):
            raise invalid("client", client, f"a string of 1 to {MAX_CLIENT_LENGTH} printable characters")
        if scheduling_policy != "fair":
            text = f"client is {client!r}; it needs scheduling_policy='fair'"
            raise RequestError(text, param="client", value=client)


def check_session(name: str, session: Any) -> str:
    """Return the name of a session, which the field `name` has, unchanged. Raises RequestError unless it is 1 to 128
    ASCII letters, digits and . _ : -.
    """
    if not isinstance(session, str) or SESSION.fullmatch(session) is None:
        raise invalid(name, session, "1 to 128 letters, digits, '.', '_', ':' and '-'")
    return session


def session_key(owner: str, session: str | None) -> str:
    """Return the key of an owner's session in the engine, "OWNER/SESSION"; "" if `session` is None."""
    return "" if session is None else f"{owner}/{session}"


def options_for(count: int, priority: Any, client: Any, loras: Sequence[str | None]) -> list[RequestOptions]:
    """Return the options of each of `count` prompts. priority, client: one for all prompts or a list, None for the
    default. loras: names of adapters, one per prompt.

    Raises RequestError if the number of priorities or clients is not `count`, ValueError if the number of loras is not.
    """
    one_for_all: list[Any] = [0 if priority is None else priority] * count
    priorities = list(priority) if _is_list(priority) else one_for_all
    several = isinstance(client, Sequence) and not isinstance(client, str)
    clients: list[Any] = list(client) if several else [client] * count
    for name, values, given in (("priority", priorities, priority), ("client", clients, client)):
        if len(values) != count:
            raise RequestError(f"{name} has {len(values)} values for {count} prompts", param=name, value=given)
    return [
        RequestOptions(priority=rank, client=who, lora=lora)
        for rank, who, lora in zip(priorities, clients, loras, strict=True)
    ]


def params_for(count: int, params: Any, max_model_len: int) -> list[SamplingParams]:
    """Return copies of sampling parameters that request one output at the end, one for each of `count` prompts, with
    max_tokens of at most `max_model_len`.

    params: one for all, or a sequence. Raises RequestError for a sequence of another length. An entry that is no
    SamplingParams is returned unchanged, for the caller to refuse.
    """
    if isinstance(params, SamplingParams):
        params = [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        given = len(params) if isinstance(params, list | tuple) else show_value(params)
        problem = f"sampling_params must be one SamplingParams or one for each of the {count} prompts, got {given}"
        raise RequestError(problem, param="sampling_params", value=params)
    return [within_context(each, max_model_len, output_kind=RequestOutputKind.FINAL_ONLY) for each in params]


def within_context(params: Any, max_model_len: int, **changes: Any) -> Any:
    """Return a copy of SamplingParams with `changes`, and with a max_tokens of at most `max_model_len`, or None.
    Another object is returned unchanged, for the caller to refuse.

    As in vLLM, a larger max_tokens is no error here; servers refuse it. Raises RequestError for `changes` that are not
    allowed.
    """
    if not isinstance(params, SamplingParams):
        return params
    most = None if params.max_tokens is None else min(params.max_tokens, max_model_len)
    return params.clone_with(max_tokens=most, **changes)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> Any:
    """Return several prompts, any sequence or array, unchanged, and a single prompt in a list. Entries are not checked.
    Raises RequestError for anything else.
    """
    batch: Any = [prompts] if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts) else prompts
    if not _is_list(batch):
        allowed = "a string, a list of token ids, a dict, or a list of them"
        problem = f"prompts must be {allowed}, got {type(prompts).__name__}"
        raise RequestError(problem, param="prompts", value=prompts)
    return batch


def _is_list(value: Any) -> TypeGuard[Sequence[Any] | np.ndarray]:
    """Return whether a value is a sequence, also a text, or an array with a dimension, but not bytes."""
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    return is_array or isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))
