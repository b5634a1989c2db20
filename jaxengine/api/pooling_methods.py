"""Methods of `LLM` for pooling models: embeddings, labels, rewards and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxengine.api import scoring
from jaxengine.api.adapters import load_each
from jaxengine.api.core import CoreMethods
from jaxengine.requests.params.lora import LoRARequest, one_for_each
from jaxengine.requests.params.options import as_batch, options_for
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.pooling import listwise
from jaxengine.requests.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.tokenization import num_kept
from jaxengine.scheduler.base.errors import RequestError

ProgressFactory = Callable[..., Any]


class PoolingMethods(CoreMethods):
    """Methods that pool, for an engine whose steps are run by the calling threads."""

    _answer: Callable[..., list[Any]]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooling model's vector for each prompt, `outputs.data` f32[N], in the order of the prompts. For a
        task that pools each token it is f32[n, N], one vector for each token.

        prompts, use_tqdm, lora_request: as for `generate`. pooling_params: one for all or one per prompt; None for the
        model's defaults. truncate_prompt_tokens, pooling_task: defaults for the truncate_prompt_tokens and task of
        pooling_params. tokenization_kwargs: a dict that may have truncate_prompt_tokens, as in vLLM. Raises
        RequestError for an invalid prompt or parameter, a result that is not finite, or a model that generates text,
        ModelFileError for an adapter, and EngineDeadError.
        """
        batch = as_batch(prompts)
        keep = num_kept(tokenization_kwargs, truncate_prompt_tokens)
        params = scoring.params_for(len(batch), pooling_params, keep, pooling_task)
        loras = load_each(self.core, self._lock, one_for_each(len(batch), lora_request))
        outputs = self._answer(batch, params, options_for(len(batch), None, None, loras), use_tqdm)
        for output in outputs:
            output.check()
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt, `outputs.embedding`, a list of floats. Arguments and errors are those of
        `encode`; it also raises RequestError for a model that does not embed.
        """
        keep = num_kept(tokenization_kwargs, truncate_prompt_tokens)
        options: Any = {"truncate_prompt_tokens": keep, "use_tqdm": use_tqdm}
        options["lora_request"] = lora_request
        outputs = self.encode(prompts, pooling_params, pooling_task="embed", **options)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return label probabilities of each prompt, `outputs.probs`, a list of floats. Arguments and errors are those
        of `encode`; it also raises RequestError for a model that does not classify.
        """
        keep = num_kept(tokenization_kwargs, truncate_prompt_tokens)
        options: Any = {"truncate_prompt_tokens": keep, "use_tqdm": use_tqdm}
        options["lora_request"] = lora_request
        outputs = self.encode(prompts, pooling_params, pooling_task="classify", **options)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a reward model's scores of each prompt, `outputs.data` f32[N], without activation unless
        pooling_params.use_activation is True. Arguments and errors are those of `encode`.
        """
        batch = as_batch(prompts)
        keep = num_kept(tokenization_kwargs, truncate_prompt_tokens)
        params = scoring.params_for(len(batch), pooling_params, keep, "classify")
        for each in params:
            each.use_activation = bool(each.use_activation)
        return self.encode(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts and return a score, `outputs.score`, for each pair, in the order of data_2. A text is a
        str, or of an embedding model {"content": parts of a message}, with images.
        One text in data_1, alone or in a list, is paired with each of data_2; two lists of equal length one by one.
        A classifier with one label (cross-encoder, reranker) reads both texts together: concatenated, or formatted by
        a chat template from messages with the roles "query" and "document". An embedding model's score is the cosine
        similarity. The score of a model that embeds each token (ColBERT) is the sum of every query token's best match.
        A listwise reranker reads a query with all of its texts of data_2; the first output has the prompt's tokens.

        lora_request: the adapter to use, one for all or one per pair, for both of its texts; None for the model alone.
        chat_template: None for the engine's option, see scoring.pair_prompt. Other arguments: see `encode`. Raises
        RequestError for an empty text, numbers of texts that do not match, a classifier with several labels, a model
        that generates text, a result that is not finite, a template given to an embedding model or a listwise reranker,
        and several adapters or a cut of prompts with the latter; ModelFileError for an adapter; EngineDeadError.
        """
        inputs = self.core.inputs
        pairs = scoring.pairs_of(data_1, data_2, inputs.media_reader)
        keep = num_kept(tokenization_kwargs, truncate_prompt_tokens)
        options: Any = {"truncate_prompt_tokens": keep, "use_tqdm": use_tqdm}
        adapters = one_for_each(len(pairs), lora_request)
        if (model := inputs.require_pooling()).reads_lists:
            scoring.refuse_template(chat_template)
            listwise.refuse_cut(pooling_params, keep)
            prompts = listwise.list_prompts(pairs)
            if len({*map(id, adapters)}) > 1:
                raise RequestError("lora_request must be one for all pairs of this model", param="lora_request")
            token_id = inputs.require_tokenizer().backend.token_to_id
            texts, own = [text for text, _ in prompts], adapters[: len(prompts)]
            found = zip(self.encode(texts, pooling_params, lora_request=own, **options), prompts, strict=True)
            return [score for each, (_, number) in found for score in listwise.list_scores(each, number, token_id)]
        if scoring.reads_apart(model):
            scoring.refuse_template(chat_template)
            roles = scoring.role_params(model, pooling_params)
            load_each(self.core, self._lock, adapters)  # an adapter's name stands for it then

            def encode(texts: list[Any], params: list[PoolingParams], own: list[LoRARequest | None]) -> list[Any]:
                """Return the outputs of `texts` in order, with its parameters and adapter (`own`) for each."""
                return self.encode(texts, params, lora_request=own, **options)

            return scoring.compare(pairs, roles, adapters, inputs, encode)
        with self._lock:
            prompts = [scoring.pair_prompt(inputs, *pair, chat_template) for pair in pairs]
        outputs = self.encode(prompts, pooling_params, lora_request=adapters, **options)
        return [ScoringRequestOutput.from_base(each) for each in outputs]
