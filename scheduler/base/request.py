"""Request of the scheduler: its tokens, how it is run, and how it ended. It has token ids and no text."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.scheduler.base.token_params import ADAPTER, TokenParams

if TYPE_CHECKING:
    from jaxengine.scheduler.base.media import Media

# stop_reason of a request that could not be sampled.
NOT_FINITE = "logits are not finite"


class RequestStatus(enum.Enum):
    """State of a request. WAITING: it has not run yet. RUNNING: it has a slot. PREEMPTED: it has lost its slot and will
    run again. FINISHED: it has ended.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Wait(enum.IntEnum):
    """Reason why a waiting request may not run, even if there is room.

    NONE: there is no such reason. TOKEN: it was preempted, and its last sampled token is not known yet. APART: it waits
    outside the queue for something that an extension provides.
    """

    NONE = 0
    TOKEN = 1
    APART = 2


class FinishReason(enum.StrEnum):
    """Reason why a request ended. STOP: a stop token or stop string. LENGTH: max_tokens or max_model_len. ABORT: its
    caller or its deadline. ERROR: a fault. REPETITION: its output repeats itself.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


@dataclass(frozen=True, eq=False)
class Adapter:
    """Identity of a loaded LoRA adapter. It differs from that of every other adapter, even of an earlier one with the
    same name.

    Attributes:
      name: name that requests use.
      digest: digest of its name and of all its weights, which enters the digests of its pages.
    """

    name: str
    digest: bytes


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to continue. Field names follow vLLM.

    Attributes:
      request_id: unique among the requests alive in an engine.
      prompt_token_ids: i32 [num_prompt_tokens].
      params: how to sample.
      max_tokens: most new tokens, already limited by max_model_len. 0 for a request that generates no text; its prompt
        may have max_model_len tokens, and the end of its prompt yields a stop token.
      stop_token_ids: ids that end the request, including `eos_token_ids`.
      eos_token_ids: the model's end-of-sequence ids, empty if the request ignores them.
      seed: 64-bit seed of the request's random stream.
      priority: under the priority policy, requests with smaller numbers run first.
      client: name of its client, under the fair policy; "" for all clients without a name.
      arrival_time: when the caller submitted it, in seconds of the engine's clock.
      deadline: on the same clock; the request is aborted once it has passed.
      cache_salt: requests share cached pages only with requests of the same salt.
      weights_digest: digest of the weights that compute its pages, b"" for those that the engine started with.
      adapter_digest: digest of the adapter that computes its pages, b"" for none; set at admission.
      weight_versions: (version of the weights, number of output tokens before the first that it computed), in order;
        empty as long as the engine's weights have never been replaced.
      media: the images, videos and sounds of the prompt, which has a placeholder for each of their embeddings.
      lora: name of the adapter to run with, None for the model alone.
      session: key of the conversation that it continues (jaxengine.requests.params.options.session_key); "" for none.
      adapter: the adapter that the engine has found under the name `lora`.
      adapter_slot: the adapter's slot on the devices while this request runs.
      per_step: whether to report every token as soon as it is known, not only the end.
      text_ends: whether its text may end it, so that the detokenizer determines how it ended and with how many tokens.
      wait: why it may not run yet; always NONE while it has a slot.
      status: its state.
      arrival_index: number of requests that the scheduler got before it; -1 until the scheduler gets it.
      output_token_ids: i32 [n], its output when it last lost its slot; up to date only while it has no slot.
      tag: a number chosen by the caller, which is returned with the request's tokens.
      page_hashes: digest chain of the full pages of the known tokens, as far as it has been computed.
      rank, slot: replica and slot in which it runs. Without a slot, slot is -1 and rank is the last replica, or -1 if
        it has never run.
      num_cached_tokens: prompt tokens found in the prefix cache at its first admission; -1 before.
      num_external_tokens: how many of these had been loaded for it from outside of the devices.
      num_preemptions: times that it lost its slot for lack of pages or was computed again.
      finish_reason, stop_reason: set by Scheduler.finish; None until it has ended.
      queued_time: when the engine got it, on the same clock; None until then.
      first_scheduled_time, first_token_time, finished_time: when these happened, on the same clock; None until then.
      kv_transfer_params: once it has ended, how another engine gets the pages of its prompt; None if none does.
      last_token_time: when its last token arrived; up to date only while it has no slot, meaningless before the first.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: TokenParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    client: str = ""
    arrival_time: float = 0.0
    deadline: float = float("inf")
    cache_salt: str | None = None
    media: Media | None = None
    lora: str | None = None
    session: str = ""
    per_step: bool = False
    text_ends: bool = False
    wait: Wait = Wait.NONE
    tag: int = -1
    weights_digest: bytes = b""
    adapter_digest: bytes = b""
    weight_versions: list[tuple[int | str, int]] = field(default_factory=list)

    status: RequestStatus = RequestStatus.WAITING
    rank: int = -1
    slot: int = -1
    adapter: Adapter | None = None
    adapter_slot: int = -1
    arrival_index: int = -1
    output_token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    page_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = -1
    num_external_tokens: int = 0
    num_preemptions: int = 0
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float = 0.0
    finished_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def features(self) -> int:
        """Optional parts of a step that the request needs: bits of jaxengine.scheduler.base.token_params, with ADAPTER
        if it has an adapter.
        """
        return self.params.features | (ADAPTER if self.adapter is not None else 0)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    def known_token_ids(self) -> np.ndarray:
        """Return the prompt and the known output, i32[n]: `prompt_token_ids` itself without output. Only correct while
        the request has no slot.
        """
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])

    def compute_with(self, weights_digest: bytes) -> None:
        """Set weights_digest, and adapter_digest to that of `adapter` (b"" for none): from now on these compute the
        request's pages. If either changes, clear `page_hashes`, which depend on them.
        """
        adapter_digest = b"" if self.adapter is None else self.adapter.digest
        if (self.weights_digest, self.adapter_digest) != (weights_digest, adapter_digest):
            self.weights_digest, self.adapter_digest = weights_digest, adapter_digest
            self.page_hashes.clear()

    def extend_page_hashes(self, token_ids: np.ndarray, page_size: int) -> list[bytes]:
        """Extend the digest chain `page_hashes` to every full page of token_ids i32 [n], and return it.

        token_ids: the known tokens from the first on; pages that already have a digest are not hashed again.

        A page's digest is the SHA-256 of the previous page's digest, its own token ids and, if it has media embeddings,
        their marks. So equal digests mean equal prefixes. What precedes the first page is a digest of weights, adapter,
        steering vectors and cache salt.
        """
        hashes = self.page_hashes
        first, last = len(hashes), len(token_ids) // page_size
        if first >= last:
            return hashes
        raw = np.ascontiguousarray(token_ids[first * page_size : last * page_size], np.int32).tobytes()
        parent = hashes[-1] if hashes else self._first_digest()
        width = page_size * 4
        marks = {} if self.media is None else self.media.marks(page_size)
        for page, start in enumerate(range(0, len(raw), width), first):
            parent = hashlib.sha256(parent + raw[start : start + width] + marks.get(page, b"")).digest()
            hashes.append(parent)
        return hashes

    def _first_digest(self) -> bytes:
        """Return the digest that precedes the first page's: the SHA-256 of the digests of weights, adapter and steering
        vectors (`steer`), as far as there are any, and of the cache salt.
        """
        # UTF-8 never contains the bytes 253 to 255, so a salt cannot be mistaken for a digest.
        weights = b"\xfe" + self.weights_digest if self.weights_digest else b""
        adapter = b"\xff" + self.adapter_digest if self.adapter_digest else b""
        steer = b"\xfd" + self.params.steer_digest if self.params.steer else b""
        return hashlib.sha256(weights + adapter + steer + (self.cache_salt or "").encode()).digest()
