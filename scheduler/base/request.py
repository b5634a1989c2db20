"""Request of the scheduler: token ids in, token ids out, and how it ended."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.scheduler.base.token_params import ADAPTER, TokenParams

if TYPE_CHECKING:
    from jaxengine.scheduler.base.media import Media

# Why a request ended whose row could not be sampled: its stop_reason.
NOT_FINITE = "logits are not finite"


class RequestStatus(enum.Enum):
    """State of a request: it has not run, holds a slot, has lost its slot and is to run again, or has ended."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Wait(enum.IntEnum):
    """Reason why a request gets no row in a step, even if there is room.

    NONE: there is no such reason. TOKEN: it was preempted before the token that it sampled last was known. APART: it
    waits for something that an extension provides, apart from the queue, so that it blocks nobody.
    """

    NONE = 0
    TOKEN = 1
    APART = 2


class FinishReason(enum.StrEnum):
    """Reason why a request ended: a stop token or text, max_tokens or max_model_len, its caller or deadline, a fault,
    or an output that repeats itself.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


@dataclass(frozen=True, eq=False)
class Adapter:
    """Identity of a loaded LoRA adapter, different from that of any other, even an earlier one of the same name.

    Attributes:
      name: by which requests name it.
      digest: of its name and of all that it computes with; begins the digests of pages.
    """

    name: str
    digest: bytes


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to continue. Field names follow vLLM.

    Attributes:
      request_id: unique among the requests alive in an engine.
      prompt_token_ids: i32[num_prompt_tokens].
      params: how to sample.
      max_tokens: new tokens at most, already capped by max_model_len; 0 for a request whose answer is no text, so that
        its prompt may have max_model_len tokens: the row that ends it gives a stop token.
      stop_token_ids: ids that end the request, `eos_token_ids` among them.
      eos_token_ids: the model's end-of-sequence ids, empty when the request ignores them.
      seed: 64-bit seed of the request's random stream.
      priority: smaller runs first under the priority policy.
      client: whose it is, under the fair policy; "" for all who have no name.
      arrival_time: when its caller asked, seconds of the engine's clock.
      deadline: the same clock; the request is aborted once it has passed.
      cache_salt: requests share cached pages only within one salt.
      weights_digest: which weights compute its pages, b"" for those that the engine started with.
      adapter_digest: of the adapter that does, b"" for none. Of a running request, that with which it was let in.
      weight_versions: (version, number of output tokens before the first that was computed with it), in order; empty
        while the engine's weights have never been replaced.
      media: the images and videos of the prompt, which has a placeholder for each of their embeddings.
      lora: the name of the adapter to run with, None for the model alone.
      session: the conversation that it continues, by its owner's name and its own; "" for none.
      adapter: what the engine has found under that name; adapter_slot: where on the devices it is while this runs.
      per_step: report every token when it is known, not only the end.
      text_ends: its text may end it, so that whoever makes text of its tokens knows how it ended and with how many.
      wait: why it is not to run yet; one with a slot waits for nothing.
      status: where it stands; arrival_index: number of requests that the scheduler got before it, -1 until then.
      output_token_ids: i32[n], its output as of the time when it last lost its slot; current only while it has none.
      tag: a number of the caller's own, which comes back with the request's tokens.
      page_hashes: digest chain of the full pages of the known tokens, as far as it has been computed.
      rank, slot: where it runs; slot is -1 while it does not, rank stays that of the last time, -1 before the first.
      num_cached_tokens: prompt tokens found in the prefix cache at first admission, -1 before it.
      num_external_tokens: those of them that had been brought there for it from outside of the devices.
      num_preemptions: times that it lost its slot for want of pages or was recomputed.
      finish_reason, stop_reason: of Scheduler.finish; None until it has ended.
      queued_time: when the engine got it, the same clock; None until then.
      first_scheduled_time, first_token_time, finished_time: likewise.
      kv_transfer_params: by which another engine gets the pages of its prompt, once it has ended; None for none.
      last_token_time: when its last token came; kept here while it holds no slot, meaningless before the first.
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
        """Return the optional parts of a step that the request needs: bits of jaxengine.scheduler.base.token_params."""
        return self.params.features | (ADAPTER if self.adapter is not None else 0)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    def known_token_ids(self) -> np.ndarray:
        """Return prompt and known output, i32[n]. Only correct while the request holds no slot."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])

    def compute_with(self, weights_digest: bytes) -> None:
        """Set the digests of the weights and of the adapter (`adapter`, b"" for none) that will compute all its tokens;
        forget page digests made with others.
        """
        adapter_digest = b"" if self.adapter is None else self.adapter.digest
        if (self.weights_digest, self.adapter_digest) != (weights_digest, adapter_digest):
            self.weights_digest, self.adapter_digest = weights_digest, adapter_digest
            self.page_hashes.clear()

    def extend_page_hashes(self, token_ids: np.ndarray, page_size: int) -> list[bytes]:
        """Extend the digest chain, `page_hashes`, over every full page of token_ids i32[n], and return that list.

        token_ids: the known tokens from the first on; pages that have a digest already are not read again.

        A page's digest is SHA-256 over its parent's digest and its token ids, so equal digests mean equal prefixes; the
        first parent carries weights, adapter, vectors and cache salt, and a page with embeddings the marks of its
        media.
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
        """Return the SHA-256 of the digests of weights, adapter and vectors (`steer`), as far as there are any, and of
        the cache salt: the parent of the first page's digest.
        """
        # No text has the bytes 253 to 255, so that no salt can stand for weights, an adapter or vectors.
        weights = b"\xfe" + self.weights_digest if self.weights_digest else b""
        adapter = b"\xff" + self.adapter_digest if self.adapter_digest else b""
        steer = b"\xfd" + self.params.steer_digest if self.params.steer else b""
        return hashlib.sha256(weights + adapter + steer + (self.cache_salt or "").encode()).digest()
