"""Log-probabilities of given completions: `LLM.get_logprobs` as requests to the engine, and its result.

A request reads a prompt and its completion except for the last token, whose log-probability is then one of the token
that the request samples. Or the request reads the prompt alone and decodes the completion (trace_decode_token_ids).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.media.inputs import has_media
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.prepared import Prompt, is_token_ids
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError, refuse, show_value


@dataclass(frozen=True)
class CompletionLogprobs(Sequence[np.ndarray]):
    """Log-probabilities of the tokens of n completions; item i is a view f32[number of tokens] of the values of
    completion i.

    Attributes:
      values: f32[N], the values of all completions one after the other.
      cu_lens: i64[n + 1], ascending from 0 to N; completion i has values[cu_lens[i] : cu_lens[i + 1]].
    """

    values: np.ndarray
    cu_lens: np.ndarray

    def __len__(self) -> int:
        return len(self.cu_lens) - 1

    def __getitem__(self, index: Any) -> Any:
        """Return the log-probabilities of one completion, a view f32[its length], or a list of those in a slice. Raises
        IndexError.
        """
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self.values[self.cu_lens[index] : self.cu_lens[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))


class KnownCompletions:
    """Completions whose log-probabilities are to be computed, and the requests that compute them.

    Attributes:
      rows: indices of the completions that have tokens; the others need no request.
      prompts, params: prompt and sampling parameters of the request for each of `rows`.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        *,
        decode: bool = False,
    ):
        """Check the arguments and build the requests. prompts: as for `generate`, without images. completions: token
        ids of the completion of each prompt. decode: decode them token by token, which needs enable_trace_replay.

        Raises RequestError, also for a pooling model, media, arguments of different lengths, decode without
        enable_trace_replay, a completion that exceeds max_model_len, and an engine whose logprobs_mode reports logits.
        """
        if decode and not inputs.config.enable_trace_replay:
            raise RequestError("decode needs an engine that was started with enable_trace_replay", param="decode")
        self._decode = decode
        mode = inputs.config.logprobs_mode
        if not mode.endswith("logprobs"):
            problem = f"logprobs_mode is {mode!r}, and log-probabilities are asked for; allowed: 'raw_logprobs'"
            raise RequestError(problem, param="logprobs_mode", value=mode)
        inputs.refuse_generation()
        for name, value in (("prompts", prompts), ("completions", completions)):
            if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
                raise refuse(name, value, "a list, one item for each completion")
        if len(completions) != len(prompts):
            problem = f"completions must be a list of token ids for each of the {len(prompts)} prompts"
            raise RequestError(problem, param="completions", value=completions)
        self._own = [_token_ids(index, each, inputs) for index, each in enumerate(completions)]
        self.rows = [index for index, own in enumerate(self._own) if own]
        self.prompts: list[dict[str, Any]] = []
        self.params: list[SamplingParams] = []
        self._first: list[int] = []
        for index in self.rows:
            self._add(index, prompts[index], inputs)

    def _add(self, index: int, prompt: Prompt, inputs: InputProcessor) -> None:
        """Append the request for completion `index`, which has tokens, after `prompt` to `prompts` and `params`, and
        the prompt's length to `_first`. With decode the completion is the trace of the output; else all of it but the
        last token follows the prompt's tokens, and the output's one token gets the last one's log-probability.
        Raises RequestError for media, and for a prompt and completion that exceed max_model_len together.
        """
        if has_media(prompt):
            raise RequestError("get_logprobs takes prompts of text or tokens, not images", param="multi_modal_data")
        _, prompt_ids, salt = inputs.read_prompt(prompt)
        own, longest = self._own[index], inputs.config.max_model_len
        if len(prompt_ids) + len(own) > longest:
            room = f"at most {max(0, longest - len(prompt_ids))}, what its prompt leaves of max_model_len ({longest})"
            problem = f"completions[{index}] has {len(own)} tokens; allowed: {room}"
            raise RequestError(problem, param="completions", value=len(own))
        salted = {} if salt is None else {"cache_salt": salt}
        read = [] if self._decode else own[:-1]
        wanted: dict[str, Any] = {"max_tokens": 1, "logprob_token_ids": own[-1:], "return_sampling_mask": False}
        if self._decode:
            wanted = {"return_sampling_mask": False, "max_tokens": None, "logprobs": 0, "trace_decode_token_ids": own}
        elif read:
            wanted |= {"prompt_logprobs": 0, "prompt_logprob_start": len(prompt_ids) - 1}
        self.prompts.append({"prompt_token_ids": [*prompt_ids, *read], **salted})
        # At temperature 1 without truncation, processed log-probabilities are the raw ones.
        final = RequestOutputKind.FINAL_ONLY
        self.params.append(SamplingParams(detokenize=False, output_kind=final, **wanted))
        self._first.append(len(prompt_ids))

    def result(self, outputs: Sequence[RequestOutput]) -> CompletionLogprobs:
        """Return the log-probabilities of all completions, also of those without tokens. outputs: results of the
        requests, in the order of `rows`. Raises RequestError if a request ended early.
        """
        lengths = [len(own) for own in self._own]
        cu_lens = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        values = np.empty(cu_lens[-1], np.float32)
        for index, first, output in zip(self.rows, self._first, outputs, strict=True):
            own, (completion,) = self._own[index], output.outputs
            known = output.prompt_logprobs[first:] if output.prompt_logprobs else []
            positions = [*known, *(completion.logprobs or ())][: len(own)]
            if len(positions) < len(own) or not completion.logprobs:
                problem = f"completions[{index}] has no log-probabilities: its request ended with "
                reason = f"{completion.finish_reason!r} ({completion.stop_reason})"
                raise RequestError(problem + reason, param="completions")
            assert all(position is not None for position in positions)
            found = [position[token].logprob for token, position in zip(own, positions, strict=True) if position]
            values[cu_lens[index] : cu_lens[index + 1]] = found
        return CompletionLogprobs(values, cu_lens)


def _token_ids(index: int, completion: Any, inputs: InputProcessor) -> list[int]:
    """Return a completion as a list of ints, which may be empty. index: number of the completion, for error messages.

    Raises RequestError unless it is a list of ids of the model's vocabulary.
    """
    name, size = f"completions[{index}]", inputs.model_config.vocab_size
    is_empty = not isinstance(completion, (str, Mapping)) and hasattr(completion, "__len__") and not len(completion)
    if not is_empty and not is_token_ids(completion):
        raise RequestError(f"{name} must be a list of token ids, got {show_value(completion)}", param="completions")
    tokens: list[Any] = list(completion)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < size:
            problem = f"{name} contains {show_value(token)}; allowed: token ids from 0 to {size - 1}"
            raise RequestError(problem, param="completions", value=token)
    return [int(token) for token in tokens]
