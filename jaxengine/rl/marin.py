"""jaxengine as the inference context of marin's reinforcement learning.

    context = JaxengineInferenceContext(LLM(model, logprobs_mode="processed_logprobs"))
    groups, metrics = environment.sample(inference_ctx=context, ...)

Needs marin-core, of which 0.2.20.dev202606180959 is tested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import numpy as np

from jaxengine.api.llm import LLM
from jaxengine.engine.stats.metric_types import Metric, Vector
from jaxengine.requests.output.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.rl.rollouts import check_logprobs, check_whole, chosen

try:
    _base: Any = import_module("marin.rl.environments.inference_ctx.base")
    _chat: Any = import_module("openai.types.chat")
    _types: Any = import_module("marin.inference.types")
except ImportError as error:
    raise ImportError(f"jaxengine.rl.marin needs marin: pip install --pre marin-core ({error})") from error

# Fields of DecodingConfig that have another name in SamplingParams.
_RENAMED = {"max_output_tokens": "max_tokens", "min_output_tokens": "min_tokens", "stop_strings": "stop"}


def named_tensors(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a Levanter model's `haliax.state_dict.to_state_dict`, in Hugging Face's shapes.

    The names are already Hugging Face's. Attention projections have separate axes for heads, groups and dimensions of a
    head, which are joined.
    """
    for name, array in state_dict.items():
        match name.split(".")[-2:]:
            case ["q_proj" | "k_proj" | "v_proj", "weight"]:
                yield name, array.reshape(-1, array.shape[-1])
            case ["q_proj" | "k_proj" | "v_proj", "bias"]:
                yield name, array.reshape(-1)
            case ["o_proj", "weight"]:
                yield name, array.reshape(array.shape[0], -1)
            case _:
                yield name, array


class JaxengineInferenceContext(_base.BaseInferenceContext):
    """marin's interface of an inference engine, over an `LLM`, which `shutdown` ends.

    Log-probabilities are the engine's: start it with logprobs_mode="processed_logprobs" for a temperature other than 1,
    as marin's losses divide logits by it.

    Attributes:
      tokenizer: the model's tokenizer, as a transformers object.
      model_name: name of the model in completions.
      mesh, axis_mapping: none, so that marin's weight transfer delivers tensors on the host.
    """

    mesh = None
    axis_mapping: Mapping[str, str] = {}

    def __init__(self, llm: LLM, *, model_name: str | None = None):
        """Store the engine and its tokenizer. model_name: reported in completions and as the policy's identity; None:
        the engine's model. Raises RequestError if the engine has no tokenizer.
        """
        self._llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.model_name = model_name or str(llm.core.config.model)

    def start_server(self, model: Any) -> None:
        """Replace the engine's weights by those of a Levanter model; None changes nothing. Raises the errors of
        `reload_model`.
        """
        if model is not None:
            self.reload_model(model, None)

    def reload_model(self, model: Any, state_dict: Mapping[str, Any] | None) -> Any:
        """Replace the engine's weights between two steps, all of them or none; return `model`.

        state_dict: state of a Levanter model, on hosts or devices; if it is None or empty, that of `model` is taken.
        Running requests are computed again from their first token. Raises WeightUpdateError for tensors that are
        missing, unknown or of a wrong shape, such as those of a trainer that has changed the size of the vocabulary;
        ValueError if there is neither a model nor a tensor.
        """
        if not state_dict:
            if model is None:
                raise ValueError("reload_model needs a model or a state_dict, got neither")
            state_dict = import_module("haliax.state_dict").to_state_dict(model)
        self._llm.update_weights(named_tensors(state_dict))  # pyright: ignore[reportArgumentType]
        return model

    def shutdown(self) -> None:
        """End the engine."""
        self._llm.shutdown()

    def get_metrics(self) -> dict[str, float]:
        """Return the values of the engine's counters and gauges by name, each summed over its labels and positions.

        Histograms are left out.
        """
        found: dict[str, float] = {}
        for each in self._llm.get_metrics():
            if isinstance(each, Metric | Vector):
                found[each.name] = found.get(each.name, 0.0) + each.value
        return found

    def batch_completions(
        self,
        prompts: Sequence[str] | Sequence[Sequence[Mapping[str, Any]]],
        n: int,
        decoding: Any,
        system_prompt: str | None = None,
    ) -> list[Any]:
        """Answer each prompt `n` times; return a ChatCompletion for each prompt, in order, once all answers are
        complete.

        The choices of a completion also have prompt_token_ids and response_token_ids. prompts: messages of a user, or
        conversations; [] returns []. decoding: a DecodingConfig. system_prompt: text before each message of a user, or
        None. Raises ValueError for log-probabilities that the engine does not report and for a system prompt with
        conversations, RuntimeError for an answer that was aborted or failed, and the errors of `LLM.chat`.
        """
        params = self._params(decoding, n)
        if not prompts:
            return []
        conversations = [self._conversation(prompt, system_prompt) for prompt in prompts]
        return [self._completion(output) for output in self._llm.chat(conversations, params, use_tqdm=False)]

    def tokenize_messages(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the token ids int32[tokens] of a conversation, as `batch_completions` would send it.

        Raises RequestError for messages that the engine refuses.
        """
        inputs = self._llm.core.inputs
        conversation, media = inputs.media_reader.read(messages)
        return np.array(inputs.chat_prompt(conversation, media)["prompt_token_ids"], np.int32)

    def tokenize_prompt(self, prompt: str, choice: Any = None, system_prompt: str | None = None) -> np.ndarray:
        """Return the token ids int32[tokens] of the prompt from which `choice` was generated.

        Without a choice, those of `prompt` as a user's message, after `system_prompt` if there is one. Raises
        RequestError for messages that the engine refuses.
        """
        if choice is not None:
            return np.array(choice.prompt_token_ids, np.int32)
        return self.tokenize_messages(self._conversation(prompt, system_prompt))

    def response_tokens_from_choice(self, choice: Any) -> np.ndarray:
        """Return the tokens int32[tokens] of a choice of `batch_completions`."""
        return np.array(choice.response_token_ids, np.int32)

    def supports_token_rollouts(self) -> bool:
        """Return whether the installed marin has batches of tokenized rollouts."""
        return hasattr(_types, "TokenizedRolloutBatchResult")

    def generate_token_rollouts(self, batch: Any) -> Any:
        """Answer a TokenizedRolloutBatchRequest; return a TokenizedRolloutBatchResult. Blocks until all answers are
        complete.

        A generation that was aborted or failed is one of its failures. A rollout's metadata have weight_versions:
        (version, start, end) of the weights that computed its tokens. Raises ValueError for log-probabilities that the
        engine does not report, and the errors of `LLM.generate`.
        """
        began = time.monotonic()
        prompts = [{"prompt_token_ids": [*request.prompt_token_ids]} for request in batch.requests]
        params = [self._token_params(request.sampling, request.n_generations) for request in batch.requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        rollouts, failures = [], []
        for request, output in zip(batch.requests, outputs, strict=True):
            for answer in output.outputs:
                if answer.finish_reason in ("stop", "length"):
                    rollouts.append(_rollout(request, answer))
                else:
                    failures.append(_failure(request, answer))
        return _types.TokenizedRolloutBatchResult(
            batch_id=batch.batch_id,
            tokenizer=batch.tokenizer,
            policy=batch.policy,
            rollouts=tuple(rollouts),
            failures=tuple(failures),
            timing=_types.TokenRolloutTiming(total=time.monotonic() - began),
            metadata={"backend": "jaxengine"},
        )

    def _params(self, decoding: Any, n: int) -> SamplingParams:
        """Return the SamplingParams of `n` answers, with the log-probabilities of their tokens, from the fields of a
        DecodingConfig; fields that are None or that SamplingParams lacks are ignored.

        Raises ValueError for log-probabilities that the engine does not report at this temperature, RequestError for
        invalid values.
        """
        check_logprobs(self._llm.core.config.logprobs_mode, decoding.temperature)
        given = {_RENAMED.get(each.name, each.name): getattr(decoding, each.name) for each in fields(decoding)}
        known = {each.name for each in fields(SamplingParams)}
        own = {name: value for name, value in given.items() if name in known and value is not None}
        return SamplingParams(n=n, logprobs=0, **own)

    def _token_params(self, sampling: Any, n: int) -> SamplingParams:
        """Return the SamplingParams of `n` answers, without text but with the log-probabilities of their tokens, from
        the fields of TokenSamplingParameters that are not None.

        Raises ValueError for log-probabilities that the engine does not report at this temperature, RequestError for
        invalid values.
        """
        check_logprobs(self._llm.core.config.logprobs_mode, sampling.temperature)
        names = ("max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed")
        given = {name: value for name in names if (value := getattr(sampling, name)) is not None}
        return SamplingParams(n=n, logprobs=0, detokenize=False, **given)

    @staticmethod
    def _conversation(prompt: str | Sequence[Mapping[str, Any]], system_prompt: str | None) -> list[Mapping[str, Any]]:
        """Return the messages of a prompt: a conversation as a list, or a text as a user's message after the system
        prompt, if any. Raises ValueError for a conversation together with a system prompt.
        """
        if not isinstance(prompt, str):
            if system_prompt is not None:
                raise ValueError(f"system_prompt must be None for conversations, got {system_prompt!r}")
            return [*prompt]
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        return [*system, {"role": "user", "content": prompt}]

    def _completion(self, output: RequestOutput) -> Any:
        """Return the ChatCompletion of all answers to a prompt.

        Raises RuntimeError if one was aborted or failed, ValueError if one has no log-probabilities.
        """
        check_whole(output.outputs)
        prompt, answers = output.prompt_token_ids, [len(each.token_ids) for each in output.outputs]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sum(answers)}
        return _chat.ChatCompletion.model_validate(
            {
                "id": output.request_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self.model_name,
                "choices": [self._choice(prompt, each) for each in output.outputs],
                "usage": {**usage, "total_tokens": len(prompt) + sum(answers)},
            }
        )

    def _choice(self, prompt: list[int], answer: CompletionOutput) -> dict[str, Any]:
        """Return the fields of a ChatCompletion's choice: index, finish_reason, message, log-probabilities by token,
        and the token ids of the prompt and the answer. A token without a name is <id_N>. Raises ValueError for an
        answer without log-probabilities.
        """
        names = self.tokenizer.convert_ids_to_tokens([*answer.token_ids])
        content = [
            {"token": name or f"<id_{token}>", "logprob": float(logprob), "bytes": None, "top_logprobs": []}
            for name, token, logprob in zip(names, answer.token_ids, chosen(answer), strict=True)
        ]
        return {
            "index": answer.index,
            "finish_reason": answer.finish_reason,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": {"content": content},
            "prompt_token_ids": prompt,
            "response_token_ids": [*answer.token_ids],
        }


def _rollout(request: Any, answer: CompletionOutput) -> Any:
    """Return the TokenizedRollout of an answer to `request`, a TokenizedRolloutRequest. The answer ended with "stop" or
    "length".

    After "length" its finish reason is LENGTH and stop_token_id is None. After "stop" the reason is EOS_TOKEN, or STOP
    if the answer has a stop_reason, and stop_token_id is the last token. Masks are False for the prompt and True for
    the answer. Its metadata have weight_versions. Raises ValueError for an answer without log-probabilities.
    """
    tokens, reasons = tuple(answer.token_ids), _types.TokenRolloutFinishReason
    stopped = answer.finish_reason == "stop"
    ended = reasons.LENGTH
    if stopped:
        ended = reasons.EOS_TOKEN if answer.stop_reason is None else reasons.STOP
    spans = [(each.version, each.start, each.end) for each in answer.weight_versions or ()]
    return _types.TokenizedRollout(
        request_id=request.request_id,
        generation_index=answer.index,
        prompt_token_ids=request.prompt_token_ids,
        completion_token_ids=tokens,
        completion_logprobs=tuple(chosen(answer).tolist()),
        finish_reason=ended,
        prompt_mask=(False,) * len(request.prompt_token_ids),
        completion_mask=(True,) * len(tokens),
        stop_token_id=tokens[-1] if stopped else None,
        metadata={"backend": "jaxengine", "weight_versions": spans},
    )


def _failure(request: Any, answer: CompletionOutput) -> Any:
    """Return the TokenizedRolloutFailure of an answer to `request` that was aborted (CANCELLED) or failed
    (BACKEND_ERROR).
    """
    reasons = _types.TokenRolloutFailureReason
    return _types.TokenizedRolloutFailure(
        request_id=request.request_id,
        generation_index=answer.index,
        reason=reasons.CANCELLED if answer.finish_reason == "abort" else reasons.BACKEND_ERROR,
        message=f"the answer ended with {answer.finish_reason} ({answer.stop_reason})",
    )
