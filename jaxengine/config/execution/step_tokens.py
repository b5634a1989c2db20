"""Default and checks of max_num_batched_tokens, the limit of tokens in a step."""

from __future__ import annotations

from jaxengine.config.base.errors import ConfigError


def step_tokens(asked: int | None, usual: int, max_num_seqs: int, max_model_len: int, chunks: bool, chunk: int) -> int:
    """Return max_num_batched_tokens: `asked` if that is given, otherwise the largest of `usual`, max_num_seqs and,
    without chunked prefill, max_model_len.

    asked: the option; None if it is not given. usual: the platform's default. chunks: enable_chunked_prefill. chunk:
    long_prefill_token_threshold. Raises ConfigError if the result is less than max_num_seqs. Without chunked prefill,
    also raises it if the result is less than max_model_len or if a threshold is given.
    """
    tokens = max(usual, max_num_seqs, 0 if chunks else max_model_len) if asked is None else asked
    if tokens < max_num_seqs:
        raise ConfigError("max_num_batched_tokens", tokens, f"at least max_num_seqs, {max_num_seqs}")
    if not chunks and tokens < max_model_len:
        allowed = f"at least max_model_len, {max_model_len}, without chunked prefill"
        raise ConfigError("max_num_batched_tokens", tokens, allowed)
    if not chunks and chunk:
        raise ConfigError("long_prefill_token_threshold", chunk, "0, without chunks")
    return tokens


def rank_tokens(tokens: int, asked: int | None, num_ranks: int, max_model_len: int, chunks: bool) -> int:
    """Return the limit of tokens in a step for one of `num_ranks` replicas that split a batch of `tokens`. It is an
    equal share, rounded up; without chunked prefill it is at least max_model_len, so that a whole prompt fits.

    asked: max_num_batched_tokens if given, else None. chunks: enable_chunked_prefill. Raises ConfigError if `asked` is
    given and its share is too small for a whole prompt without chunked prefill.
    """
    share = -(-tokens // num_ranks)
    if chunks or share >= max_model_len:
        return share
    if asked is not None:
        allowed = f"at least {num_ranks * max_model_len}: {num_ranks} ranks share a step, each with whole prompts"
        raise ConfigError("max_num_batched_tokens", asked, allowed)
    return max_model_len
