"""Parameters of a request whose pages another engine gets from this one, or has for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KVTransferParams:
    """vLLM's kv_transfer_params of a request.

    Attributes:
      do_remote_decode: another engine continues the request, and gets the pages of its prompt.
      do_remote_prefill: another engine has computed the pages of the prompt; the other fields say which and where.
      remote_engine_id: id of that engine.
      remote_request_id: id of the lease under which it keeps them.
      remote_block_ids: for each cache group, columns of the prompt whose pages that engine has; then those with a
        recurrent state after them, if the model has any.
      remote_host, remote_port: address on which that engine listens; None for none.
      tp_size: its tensor_parallel_size.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: tuple[tuple[int, ...], ...] = ()
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None
