"""Preparation of requests: prompts and parameters become checked requests of token ids, with limits and defaults.

Everything is checked before anything changes. No engine is needed: an API process can prepare requests for the engine's
process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxengine.checkpoint.input_source import ControlVector, InputSource
from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.config.features.logits_processors import processor_classes
from jaxengine.config.features.pooling_model import PoolingModel
from jaxengine.media.load import MultiModalData
from jaxengine.media.messages import MediaReader
from jaxengine.media.open import open_processor
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import POOLED
from jaxengine.requests.media.inputs import (
    DATA,
    OPTIONS,
    PROMPT_EMBEDS,
    READY,
    MediaInputs,
    has_media,
    is_given,
    one_prompt,
    verify_whole,
)
from jaxengine.requests.output.output_processor import OutputProcessor
from jaxengine.requests.output.pooling_processor import PoolingProcessor
from jaxengine.requests.params.bad_word_tokens import verify_bad_word_tokens
from jaxengine.requests.params.options import RequestOptions, session_key
from jaxengine.requests.params.prepared import PROMPT_KEYS, PreparedRequest, Prompt, verify_salt
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.pooling_texts import text_ids
from jaxengine.requests.sampling_mask import decide_sampling_mask
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error, refuse, show_value
from jaxengine.scheduler.base.logits_processor import LogitsProcessor
from jaxengine.scheduler.base.request import Request
from jaxengine.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxengine.requests.params.activations import Steer

Processor = OutputProcessor | PoolingProcessor


class InputProcessor:
    """Preparation of requests for an engine with this config and model.

    Attributes:
      config, model_config: the engine's.
      tokenizer: the engine's; None with skip_tokenizer_init.
      generation_defaults: the model's default sampling parameters.
      pooling: how a pooling model computes its answers; None for a generating model.
      media: preparation of images, videos and sounds; None for a text model.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        generation_defaults: Mapping[str, Any],
        *,
        origin: int = 0,
        pooling: PoolingModel | None = None,
        media: MediaInputs | None = None,
        control_vectors: Mapping[str, ControlVector] | None = None,
    ):
        """Store the arguments. origin: number of this process among those that prepare requests for the engine, so that
        their random seeds differ. control_vectors: steering vectors that requests may refer to, by name; None for none.
        """
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.generation_defaults = generation_defaults
        self.pooling = pooling
        self.media = media
        self._control_vectors = control_vectors or {}
        self._origin = origin
        self._num_requests = 0

    @cached_property
    def _structured_defaults(self) -> tuple[str, ...]:
        """Switches of structured_outputs_config that apply to every request."""
        return self.config.structured_outputs_config.chosen

    @cached_property
    def _processors(self) -> list[type[LogitsProcessor]]:
        """Classes of the engine's logits processors. Raises ConfigError for one that cannot be imported."""
        return processor_classes(self.config.logits_processors)

    def default_sampling_params(self) -> SamplingParams:
        """Return new SamplingParams with the model's defaults (options generation_config and
        override_generation_config), and vLLM's for fields for which the model has none.
        """
        return SamplingParams(**self.generation_defaults)

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises RequestError if the engine was started without one."""
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set", param="skip_tokenizer_init")
        return self.tokenizer

    @cached_property
    def media_reader(self) -> MediaReader:
        """Reader of images and videos in conversations. For a text model it has no media processor."""
        return MediaReader(None, self.config) if self.media is None else self.media.reader

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        multi_modal_data: MultiModalData | None = None,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: str | None = None,
    ) -> dict[str, Any]:
        """Return the prompt of a conversation, for `prepare`: "prompt" (its text), "prompt_token_ids" and, where they
        are not empty, "multi_modal_data" and "mm_processor_kwargs" as given.

        messages, multi_modal_data: results of `media_reader.read`. mm_processor_kwargs: options of the media processor.
        chat_template, content_format: None for the engine's options, or else the model's template. The other arguments
        are those of Tokenizer.apply_chat_template. Raises RequestError without a tokenizer and for messages or
        arguments that the template cannot render, and OverloadedError if too many templates are being rendered.
        """
        tokenizer = self.require_tokenizer()
        text = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template or self.config.chat_template,
            chat_template_kwargs=chat_template_kwargs,
            placeholder=self.media_reader.placeholder,
            content_format=content_format,
        )
        # The template's text contains the special tokens.
        prompt = {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        given = (DATA, multi_modal_data), (OPTIONS, mm_processor_kwargs)
        return {**prompt, **{name: value for name, value in given if value}}

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> PreparedRequest:
        """Check a request, tokenise its text, and return it prepared. This is slow for images that `make_ready` has not
        processed.

        prompt: may be embeddings, with enable_prompt_embeds. params: PoolingParams for a pooling model. request_id:
        None for the request's number; with n > 1 the engine's requests have the ids NUMBER_ID. options: None for the
        defaults.

        Raises:
          RequestError: the request is invalid, or its parameters are not of the model's kind. The error names the
            field, its value and what is allowed.
        """
        if isinstance(params, PoolingParams):
            return self._prepare_pooling(prompt, params, request_id, options or RequestOptions())
        self.refuse_generation()
        if not isinstance(params, SamplingParams):
            problem = f"sampling_params must be a SamplingParams, got {type(params).__name__}"
            raise RequestError(problem, param="sampling_params")
        params = params.checked()
        if (has_option := self.config.return_sampling_mask) or params.return_sampling_mask:
            decide_sampling_mask(params, has_option)
        options = options or RequestOptions()
        options.verify_against(self.config.scheduling_policy, self.config.enable_lora)
        prompt = self.make_ready(prompt)
        text, token_ids, salt = self.read_prompt(prompt)
        if (parser := self.config.structured_outputs_config.reasoning_parser) and self.tokenizer is not None:
            from jaxengine.requests.reasoning import after_reasoning

            params = after_reasoning(params, parser, text, token_ids, self.tokenizer)
        media = prompt.get(READY) if isinstance(prompt, Mapping) else None
        longest = self.config.max_model_len
        if media is not None and self.media is None:
            from jaxengine.requests.media.prompt_embeds import check_embedded

            check_embedded(params)
        if not 1 <= len(token_ids) < longest:
            raise prompt_length_error("prompt", len(token_ids), longest - 1, longest)
        params.verify_against(
            self.model_config.vocab_size, self.config.max_logprobs, longest, self.tokenizer is not None, len(token_ids)
        )
        bad_words = self._tokenize_bad_words(params)
        index = self._count_request()
        request_id = request_id if request_id is not None else str(index)
        shared = self._request_fields(token_ids, params, bad_words) | _option_fields(options)
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{number}_{request_id}",
                seed=self._draw_seed(index, number) if seed is None else seed,
                cache_salt=salt,
                media=media,
                **shared,
            )
            for number, seed in enumerate(map(params.child_seed, range(params.n)))
        ]
        return PreparedRequest(request_id, text, params, requests)

    def refuse_generation(self) -> None:
        """Raise RequestError if the model is a pooling model."""
        if self.pooling is not None:
            problem = f"this model pools (task {self.pooling.task!r}) and generates no text; see docs/pooling_models.md"
            raise RequestError(problem, param="model")

    def require_pooling(self) -> PoolingModel:
        """Return the PoolingModel, which describes how answers are computed. Raises RequestError for a generating
        model.
        """
        if self.pooling is None:
            problem = "this model generates text; start it with runner='pooling' for embeddings, labels and scores"
            raise RequestError(problem, param="model")
        return self.pooling

    def _prepare_pooling(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None, options: RequestOptions
    ) -> PreparedRequest:
        """Check a request to a pooling model, tokenise and truncate its prompt, and return it prepared. `params` of the
        result is a PoolingRecipe. A prompt with media is not truncated.

        Raises RequestError for an invalid prompt, parameter or option, for a generating model, and for a prompt that is
        longer than max_model_len after truncation.
        """
        model, longest = self.require_pooling(), self.config.max_model_len
        recipe = params.recipe(model)
        most = model.pooler.width(self.model_config.hidden_size)
        if recipe.dimensions is not None and recipe.dimensions > most:
            text = f"dimensions is {recipe.dimensions}; allowed: 1 to {most}"
            raise RequestError(text, param="dimensions", value=recipe.dimensions)
        options.verify_against(self.config.scheduling_policy, self.config.enable_lora)
        prompt = self.make_ready(prompt)
        media = prompt.get(READY) if isinstance(prompt, Mapping) else None
        prefix, keep = params.prefix(model), params.num_kept(longest)
        text, token_ids, salt = self.read_prompt(prompt, prefix)
        if media is not None:
            verify_whole(len(token_ids), keep, params.truncate_prompt_tokens, "" if text is None else prefix)
        elif keep is not None:
            token_ids = model.cut(token_ids, keep)
        if not 1 <= len(token_ids) <= longest:
            raise prompt_length_error("prompt", len(token_ids), longest, longest)
        index = self._count_request()
        request = Request(
            request_id=str(index) if request_id is None else request_id,
            prompt_token_ids=np.array(token_ids, np.int32),
            params=params.token_params(model, recipe),
            max_tokens=0,
            stop_token_ids=(POOLED,),
            eos_token_ids=(POOLED,),
            cache_salt=salt,
            media=media,
            per_step=True,
            **_option_fields(options),
        )
        return PreparedRequest(request.request_id, text, recipe, [request])

    def _count_request(self) -> int:
        """Count a request and return its number, from 1."""
        self._num_requests += 1
        return self._num_requests

    def read_prompt(self, prompt: Prompt, prefix: str = "") -> tuple[str | None, list[int], str | None]:
        """Return (text, token ids, cache salt) of a prompt, with None for a missing text or salt.

        prefix: that of a pooling model's `text_ids`; not used for other models and token ids. Ids from `make_ready`,
        and a text beside ids, are not checked. Raises RequestError for a prompt of another form, unknown keys, empty
        text, text without a tokenizer, invalid token ids and an invalid cache salt.
        """
        salt = None
        if isinstance(prompt, Mapping):
            if unknown := prompt.keys() - {*PROMPT_KEYS, READY}:
                name = sorted(map(str, unknown))[0]
                problem = f"prompt has the key {show_value(name)}; allowed: {', '.join(PROMPT_KEYS)}"
                raise RequestError(problem, param="prompt", value=name)
            salt = prompt.get("cache_salt")
            verify_salt(salt)
            if "prompt_token_ids" in prompt:
                ids: Any = prompt["prompt_token_ids"]
                return prompt.get("prompt"), ids if READY in prompt else self._check_token_ids(ids), salt
            prompt = prompt.get("prompt", None)
        if isinstance(prompt, (list, tuple, range, np.ndarray)):
            return None, self._check_token_ids(prompt), salt
        if not isinstance(prompt, str):
            raise RequestError(
                "prompt must be a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids', got "
                f"{type(prompt).__name__}",
                param="prompt",
                value=prompt,
            )
        if not prompt:
            raise RequestError("prompt is empty; at least one character is needed", param="prompt", value=prompt)
        if self.tokenizer is None:
            problem = "prompt is text, but the engine has `skip_tokenizer_init=True`; give prompt_token_ids"
            raise RequestError(problem, param="prompt", value=prompt)
        if self.pooling is None:
            return prompt, self.tokenizer.encode(prompt), salt
        return prompt, text_ids(self.tokenizer, self.pooling, prefix, prompt, self.config.chat_template), salt

    def make_ready(self, prompt: Prompt) -> Prompt:
        """Return a prompt for `prepare` whose images and videos are preprocessed for the encoder, and whose embeddings
        are replaced by placeholder tokens and their Media. A prompt without media or embeddings is returned unchanged.

        This is slow for media and must not be called on an event loop. Raises RequestError for a prompt, media or
        embeddings that cannot be used, and for media in a prompt for a text model.
        """
        if isinstance(prompt, Mapping) and prompt.get(PROMPT_EMBEDS) is not None and READY not in prompt:
            from jaxengine.requests.media.prompt_embeds import embeds_prompt

            token_ids, media = embeds_prompt(prompt, self.config, self.model_config.hidden_size)
            return {"prompt_token_ids": token_ids, READY: media, "cache_salt": prompt.get("cache_salt")}
        if isinstance(prompt, str) or not has_media(prompt):
            return prompt
        if self.media is None:
            name = DATA if is_given(prompt.get(DATA)) else OPTIONS
            problem = f"{name} is given, but this model takes text only (see limit_mm_per_prompt, language_model_only)"
            raise RequestError(problem, param=name)
        prompt = one_prompt(prompt)
        text, token_ids, _ = ("", [], None) if self.media.stand_alone(prompt) else self.read_prompt(prompt)
        return self.media.made_ready(prompt, text, token_ids)

    def _check_token_ids(self, token_ids: Any) -> list[int]:
        """Return token ids as a list of ints. Raises RequestError for anything but a sequence of ints, for an empty
        one, and for ids outside of the vocabulary.
        """
        vocab_size = self.model_config.vocab_size
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)) or not token_ids:
            raise refuse("prompt_token_ids", token_ids, "a list of at least one token id")
        ids = list(token_ids)
        for index, token_id in enumerate(ids):
            if isinstance(token_id, np.integer):
                ids[index] = token_id = int(token_id)
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                problem = f"prompt_token_ids holds {show_value(token_id)}; allowed: integers from 0 to {vocab_size - 1}"
                raise RequestError(problem, param="prompt_token_ids", value=token_id)
        return ids

    def _request_fields(
        self, token_ids: list[int], params: SamplingParams, bad_words: list[list[int]]
    ) -> dict[str, Any]:
        """Return the fields of scheduler.Request that the n requests of one caller's request share, without those of
        its options: prompt_token_ids, params, max_tokens (at most what max_model_len or the trace leaves room for),
        eos_token_ids (none with ignore_eos or a trace), stop_token_ids (those included), per_step and text_ends.

        token_ids: token ids of the prompt. bad_words: token ids of params.bad_words. Raises RequestError for parameters
        that TokenParams cannot express and for steering that the engine does not support.
        """
        trace = params.trace_decode_token_ids
        room = self.config.max_model_len - len(token_ids) if trace is None else len(trace)
        eos = () if params.ignore_eos or trace else self.eos_token_ids()
        token_params = params.token_params(bad_words, self._structured_defaults, self._processors, self._tokenize_words)
        if params.steer:
            from jaxengine.requests.params.steering_vectors import steered

            steer = cast("Sequence[Steer]", params.steer)
            token_params = steered(token_params, steer, self.config, self.model_config, self._control_vectors)
        return {
            "prompt_token_ids": np.array(token_ids, np.int32),
            "params": token_params,
            "max_tokens": room if params.max_tokens is None else min(params.max_tokens, room),
            "eos_token_ids": eos,
            "stop_token_ids": tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            "per_step": follows_every_step(params),
            "text_ends": ends_by_output(params),
        }

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end an output, without repeats: first the tokenizer's, then the model's."""
        ids = () if self.tokenizer is None else self.tokenizer.eos_token_ids
        return tuple(dict.fromkeys((*ids, *self.model_config.eos_token_ids)))

    def _draw_seed(self, index: int, number: int) -> int:
        """Return the 64-bit seed of output `number` of request number `index`: a hash of these two, the engine's seed
        and `origin`. Every run with the same engine seed draws the same seeds.
        """
        origin = f"/{self._origin}" if self._origin else ""
        digest = hashlib.sha256(f"{self.config.seed}/{index}/{number}{origin}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def _tokenize_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of each of params.bad_words: as tokenised at the start of a text, and as tokenised after
        a space unless that ends with the former. [] without bad words.

        Raises RequestError for a blank word, and for too many tokens.
        """
        if not params.bad_words:
            return []
        assert self.tokenizer is not None
        sequences: list[list[int]] = []
        for word in params.bad_words:
            if not word.strip():
                problem = f"bad_words holds {show_value(word)}; allowed: words that are not blank"
                raise RequestError(problem, param="bad_words", value=word)
            plain = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences.append(plain)
            if spaced[-len(plain) :] != plain:
                sequences.append(spaced)
        verify_bad_word_tokens(sequences)
        return sequences

    def _tokenize_words(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text around reasoning; () if an id is outside of the model's vocabulary."""
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return tuple(ids) if max(ids, default=0) < self.model_config.vocab_size else ()


def _option_fields(options: RequestOptions) -> dict[str, Any]:
    """Return the fields of scheduler.Request that come from the options: priority, client ("" for none), lora, session
    (its key for the owner), arrival_time and deadline, in seconds of time.monotonic, which is infinite without a
    timeout.
    """
    return {
        "priority": options.priority,
        "client": options.client or "",
        "lora": options.lora,
        "session": session_key(options.owner, options.session),
        "arrival_time": options.arrival,
        "deadline": float("inf") if options.timeout is None else options.arrival + options.timeout,
    }


def make_processor(inputs: InputProcessor) -> Processor:
    """Return a new output processor for requests that `inputs` prepares: a PoolingProcessor for a pooling model,
    otherwise an OutputProcessor.
    """
    if inputs.pooling is not None:
        return PoolingProcessor()
    return OutputProcessor(inputs.tokenizer, inputs.config.stream_interval)


def follows_every_step(params: SamplingParams) -> bool:
    """Return whether a request's tokens are needed as soon as they are generated, for a stream, stop strings,
    repetition detection, logprobs or what truncation kept.
    """
    streamed = params.output_kind is not RequestOutputKind.FINAL_ONLY
    return streamed or ends_by_output(params) or params.num_logprobs is not None or bool(params.return_sampling_mask)


def ends_by_output(params: SamplingParams) -> bool:
    """Return whether the content of the output may end it, by a stop string or a repetition."""
    return bool(params.stop) or params.repetition_detection is not None


def input_processor(source: InputSource, config: ResolvedConfig, *, origin: int = 0) -> InputProcessor:
    """Return the InputProcessor for an engine of this model. It reads the tokenizer and the media processor, and needs
    no device. origin: see InputProcessor.

    Raises ConfigError for default sampling parameters that cannot be used and for an unknown reasoning parser,
    ModelFileError for an invalid tokenizer or media processor, and ModelConfigError for an invalid configuration of the
    media processor.
    """
    try:
        SamplingParams(**source.generation_defaults)
    except RequestError as error:
        files = f"of {config.generation_config}" if config.generation_config != "auto" else f"of {source.path}"
        problem = f"the default sampling parameters {files} cannot be used: {error}"
        name = "override_generation_config" if config.override_generation_config else "generation_config"
        advice = "set override_generation_config, or generation_config='vllm'"
        raise ConfigError.because(name, problem, advice) from error
    if config.structured_outputs_config.reasoning_parser:
        from jaxengine.requests.reasoning import check_reasoning

        check_reasoning(config)
    tokenizer = source.load_tokenizer(config)
    processor = open_processor(source.path, source.config, config.hf_overrides, tokenizer, config.config_format)
    towers = source.config.towers
    media = None if processor is None else MediaInputs(processor, towers, config, source.config.hidden_size)
    if media is not None:
        media.adapter = source.media_adapter
    return InputProcessor(
        config,
        source.config,
        tokenizer,
        source.generation_defaults,
        origin=origin,
        pooling=source.pooling,
        media=media,
        control_vectors=source.control_vectors,
    )
