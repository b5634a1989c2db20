"""jaxengine as a backend of NVIDIA Dynamo: `python -m jaxengine.server.dynamo --model MODEL [options of the engine]`.

Dynamo's frontend tokenizes, routes and detokenizes; this worker turns token ids into token ids. The engine's kv_role
makes it a prefill or a decode worker, and kv_events_config lets the router find prefixes. Needs ai-dynamo, of which
1.6.1 is tested.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Iterator
from importlib import import_module
from typing import Any

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.config.engine_args import EngineArgs
from jaxengine.config.kv.kv_events import address_of_replica
from jaxengine.config.kv.kv_transfer import CONSUMER, PRODUCER
from jaxengine.requests.output.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.scheduler.base.sampling_fields import ROWS

# Imported by name: it is in no extra, as it pins other versions of what jaxengine needs.
try:
    _backend: Any = import_module("dynamo.common.backend")
    _constants: Any = import_module("dynamo.common.constants")
    _publisher: Any = import_module("dynamo.common.backend.publisher")
except ImportError as error:
    raise ImportError("jaxengine.server.dynamo needs Dynamo: pip install ai-dynamo==1.6.1") from error

# Flags of Dynamo's worker, with their defaults.
_WORKER = {
    "namespace": "dynamo",
    "component": "backend",
    "endpoint": "generate",
    "endpoint_types": "chat,completions",
    "discovery_backend": "etcd",
    "request_plane": "tcp",
    "event_plane": None,
    "tool_call_parser": None,
    "reasoning_parser": None,
}
# Request options that Dynamo's frontend applies itself, and values of unsupported options that change nothing.
_FRONTENDS = ("stop", "include_stop_str_in_output")
_NEUTRAL = {"use_beam_search": (False,), "length_penalty": (1.0,), "best_of": (1,)}
# Request options that SamplingParams has under the same name.
_SAME = (*ROWS, "n", "seed", "logit_bias", "max_tokens", "min_tokens", "ignore_eos")


class DynamoEngine(_backend.LLMEngine):
    """Dynamo's LLMEngine, implemented by an AsyncLLM.

    Attributes:
      engine: the AsyncLLM; None before `start` and after `cleanup`.
    """

    def __init__(self, options: EngineArgs, mode: Any, served_model_name: str | None = None):
        """Store the options; starts nothing. mode: a member of Dynamo's DisaggregationMode. served_model_name: None for
        the model's own.
        """
        self._options, self._mode, self._name = options, mode, served_model_name
        self.engine: AsyncLLM | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, Any]:
        """Return the engine of a command line, not started, and Dynamo's WorkerConfig. The engine's kv_role decides
        whether it is a prefill, a decode or an aggregated worker.

        argv: None for the program's own arguments. Raises ConfigError for an invalid engine option, and SystemExit for
        an unknown flag or without --model.
        """
        parser = argparse.ArgumentParser(prog="python -m jaxengine.server.dynamo", allow_abbrev=False)
        group = parser.add_argument_group("Dynamo")
        for name, default in (*_WORKER.items(), ("served_model_name", None)):
            group.add_argument(f"--{name.replace('_', '-')}", default=default, dest=f"dynamo_{name}")
        args = EngineArgs.add_cli_args(parser).parse_args(argv)
        if args.model is None:
            parser.error("--model is missing")
        options, served = EngineArgs.from_cli_args(args), args.dynamo_served_model_name
        transfer, modes = options.kv_transfer_config, _constants.DisaggregationMode
        role = None if transfer is None or transfer.handover is None else transfer.handover.kv_role
        mode = {PRODUCER: modes.PREFILL, CONSUMER: modes.DECODE}.get(role or "", modes.AGGREGATED)
        worker = _backend.WorkerConfig(
            **{name: getattr(args, f"dynamo_{name}") for name in _WORKER},
            model_name=args.model,
            served_model_name=served or args.model,
            use_kv_events=options.publishes_kv_events,
            disaggregation_mode=mode,
        )
        return cls(options, mode, served), worker

    async def start(self, worker_id: int) -> Any:
        """Start the engine on a thread, set `engine` to it, and return Dynamo's EngineConfig with its limits. worker_id
        is not used. Raises ConfigError and the errors of loading a model.
        """
        self.engine = engine = await asyncio.to_thread(AsyncLLM.from_engine_args, self._options)
        config, scheduler = engine.core.runner.config, engine.core.engine.scheduler.config
        registration = _backend.LlmRegistration(
            context_length=config.max_model_len,
            kv_cache_block_size=config.block_size,
            total_kv_blocks=scheduler.num_pages,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            data_parallel_size=engine.core.runner.num_ranks,
        )
        model = str(self._options.model)
        return _backend.EngineConfig(model=model, served_model_name=self._name or model, llm=registration)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a request's tokens in Dynamo's chunks as they are generated. The last chunk of each output has its
        finish_reason, and completion_usage over all outputs so far.

        request: Dynamo's request, with token_ids. context: call's context, whose id() becomes the request's id. Raises
        RequestError for an option that is not supported, and the errors of AsyncLLM.generate.
        """
        assert self.engine is not None, "Dynamo calls `start` first"
        params = self._params(request)
        num_prompt, counts = len(request["token_ids"]), dict[int, int]()
        prompt: Any = {"prompt_token_ids": request["token_ids"]}
        async for output in self.engine.generate(prompt, params, request_id=context.id()):
            for chunk in self._chunks(output):
                counts[chunk["index"]] = counts.get(chunk["index"], 0) + len(chunk["token_ids"])
                if "finish_reason" in chunk:
                    made = sum(counts.values())
                    usage = {"prompt_tokens": num_prompt, "completion_tokens": made, "total_tokens": num_prompt + made}
                    chunk["completion_usage"] = usage
                yield chunk

    async def abort(self, context: Any) -> None:
        """Abort the request with the id context.id(). Does nothing without an engine."""
        if self.engine is not None:
            await self.engine.abort(context.id())

    async def cleanup(self) -> None:
        """Set `engine` to None, then shut the engine down on a thread and wait for that. Does nothing if it was not
        started.
        """
        engine, self.engine = self.engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    async def kv_event_sources(self) -> list[Any]:
        """Return one ZmqSource for each replica: the address and topic of its KV events. [] before `start`, and if
        kv_events_config is missing or does not publish.
        """
        events = self._options.kv_events_config
        if self.engine is None or events is None or not events.publishes:
            return []
        endpoint, ranks = events.endpoint.replace("*", "127.0.0.1"), range(self.engine.core.runner.num_ranks)
        return [_publisher.ZmqSource(address_of_replica(endpoint, rank), events.topic, rank) for rank in ranks]

    def _params(self, request: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a request. Outputs have new tokens only, without texts.

        A prefill worker generates one token and hands its pages over; a decode worker gets the kv_transfer_params of
        the request's prefill_result. An option that is None, has a value without effect (_NEUTRAL) or concerns the
        frontend alone (_FRONTENDS) is left out. Raises RequestError for another one that is not supported, and for
        invalid values.
        """
        sampling, stops = (dict(request.get(name) or {}) for name in ("sampling_options", "stop_conditions"))
        guided = {name: one for name, one in (sampling.pop("guided_decoding", None) or {}).items() if one is not None}
        guided.pop("backend", None)
        hidden, shown = stops.pop("stop_token_ids_hidden", None), stops.pop("stop_token_ids", None)
        output = request.get("output_options") or {}
        options: dict[str, Any] = {
            "stop_token_ids": [*(shown or ()), *(hidden or ())],
            "logprobs": output.get("logprobs"),
            "prompt_logprobs": output.get("prompt_logprobs"),
            "thinking_token_budget": stops.pop("max_thinking_tokens", None),
            "structured_outputs": StructuredOutputsParams(**guided) if guided else None,
            "output_kind": RequestOutputKind.DELTA,
            "detokenize": False,
            "return_sampling_mask": False,  # chunks have no field for it
        }
        for name, value in {**sampling, **stops}.items():
            if value is None or name in _FRONTENDS or value in _NEUTRAL.get(name, ()):
                continue
            if name not in _SAME:
                raise RequestError(f"{name} is {show_value(value)}; not supported here, leave it out", param=name)
            options[name] = value
        modes, transfer = _constants.DisaggregationMode, None
        if self._mode is modes.PREFILL:
            options["max_tokens"], transfer = 1, {"do_remote_decode": True}
            options["min_tokens"] = min(1, options.get("min_tokens", 0))
        elif self._mode is modes.DECODE:
            handed = (request.get("prefill_result") or {}).get("disaggregated_params") or {}
            transfer = handed.get("kv_transfer_params")
        if transfer:
            options["extra_args"] = {"kv_transfer_params": transfer}
        return SamplingParams(**options)

    def _chunks(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yield one of Dynamo's chunks for each of a request's outputs that has new tokens or has ended.

        It has token_ids and index; with logprobs also log_probs and top_logprobs, a list for each token; at the end
        also finish_reason, in which "abort" becomes "cancelled", and disaggregated_params if the output has
        kv_transfer_params.
        """
        assert self.engine is not None
        for one in output.outputs:
            if not one.token_ids and one.finish_reason is None:
                continue
            chunk: dict[str, Any] = {"token_ids": list(one.token_ids), "index": one.index}
            if one.logprobs:
                own = zip(one.token_ids, one.logprobs, strict=True)
                chunk["log_probs"] = [position[token].logprob for token, position in own]
                tokenizer = None if self._options.skip_tokenizer_init else self.engine.get_tokenizer()
                chunk["top_logprobs"] = _top_logprobs(one, tokenizer)
            if one.finish_reason is not None:
                chunk["finish_reason"] = {"abort": "cancelled"}.get(str(one.finish_reason), str(one.finish_reason))
                if output.kv_transfer_params is not None:
                    chunk["disaggregated_params"] = {"kv_transfer_params": output.kv_transfer_params}
            yield chunk


def _top_logprobs(one: CompletionOutput, tokenizer: Any) -> list[list[dict[str, Any]]]:
    """Return, for each new position, Dynamo's entries (rank, token_id, token, logprob) of the tokens with logprobs; []
    without logprobs.

    tokenizer: None to write "token_id:N" in place of a token's text.
    """

    def text(token: int) -> str:
        """Return a token's text, or "token_id:N" without a tokenizer."""
        return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])

    return [
        [
            {"rank": each.rank, "token_id": token, "token": text(token), "logprob": each.logprob}
            for token, each in position.items()
        ]
        for position in one.logprobs or ()
    ]


if __name__ == "__main__":
    import_module("dynamo.common.backend.run").run(DynamoEngine)
