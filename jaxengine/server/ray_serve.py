"""Engines as Ray Serve replicas behind one HTTP endpoint: `serve run jaxengine.server.ray_serve:app model=...`.

The ingress speaks OpenAI's API (jaxengine.server.http) and tokenises; a replica generates. Ray picks the replica with
the shorter queue, and adds or removes replicas by the length of the queues. When a replica is lost, answers that had
begun fail, and requests without output are retried on another one. An engine over several hosts is one replica with a
placement group that has a bundle on each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.api.engine_client import EngineDeadError
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.requests.inputs import InputProcessor, input_processor
from jaxengine.requests.options import RequestOptions
from jaxengine.requests.outputs import SAMPLING_FIELDS, CompletionOutput, RequestOutput
from jaxengine.requests.prepared import Prompt
from jaxengine.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.errors import OverloadedError, RequestError
from jaxengine.server.http.app import create_app
from jaxengine.server.options import ServerConfig


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Ray's options for the engines.

    Attributes:
      min_replicas, max_replicas: least and largest number of engines.
      target_ongoing_requests: requests per replica, running and waiting, that Ray aims at; None: max_num_seqs, or 32
        if that is not given.
      num_ingresses: processes that serve HTTP.
      num_cpus, num_gpus, resources: needs of each host of a replica; TPUs are resources, {"TPU": 4}.
      placement_strategy: for the hosts of an engine with nnodes > 1.
      num_attempts: replicas on which a request without output is tried.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: int | None = None
    num_ingresses: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    placement_strategy: str = "STRICT_SPREAD"
    num_attempts: int = 5

    def __post_init__(self):
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError("min_replicas", self.min_replicas, f"1 to max_replicas, {self.max_replicas}")
        for name in ("num_ingresses", "num_attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        if self.placement_strategy not in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
            raise ConfigError("placement_strategy", self.placement_strategy, "PACK, SPREAD, STRICT_PACK, STRICT_SPREAD")


class Call(msgspec.Struct):
    """Request sent to a replica.

    Attributes:
      params: fields of SamplingParams that differ from their defaults. The replica makes the object, so that its rules
        hold there; a typed field could not be decoded, for some fields take one of several kinds of mapping.
      age: seconds since its arrival. It replaces the options' arrival, since clocks differ between machines.
    """

    prompt_token_ids: list[int]
    params: dict[str, Any]
    prompt: str | None = None
    cache_salt: str | None = None
    options: RequestOptions = msgspec.field(default_factory=RequestOptions)
    age: float = 0.0


class Answer(msgspec.Struct):
    """Output sent back, or the reason why there is none.

    Attributes:
      error: message of a RequestError; param: its field.
      retry_after: seconds of an OverloadedError; None for other errors.
    """

    output: RequestOutput | None = None
    error: str | None = None
    param: str | None = None
    retry_after: float | None = None


def _pack_other(value: Any) -> Any:
    """Encode an array as its dtype's name, its shape and its bytes. Raises NotImplementedError for another kind of
    object.
    """
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot be sent to or from a replica")
    return [value.dtype.name, value.shape, value.tobytes()]


def _unpack_other(kind: type, value: Any) -> Any:
    """Decode what _pack_other encoded. kind: the annotated type, np.ndarray."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} cannot be sent to or from a replica")
    name, shape, data = value
    return np.frombuffer(bytearray(data), jnp.dtype(name)).reshape(shape)  # a bytearray: arrays can be written to


_encode = msgspec.msgpack.Encoder(enc_hook=_pack_other).encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_answer = msgspec.msgpack.Decoder(Answer, dec_hook=_unpack_other).decode
_DEFAULTS = SamplingParams()


def _pack_params(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of `params` that differ from their defaults."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}


def _unpack_params(given: Mapping[str, Any]) -> SamplingParams:
    """Make SamplingParams of the fields from _pack_params, after msgpack has turned enums into their values."""
    if "output_kind" in given:
        given = {**given, "output_kind": RequestOutputKind(given["output_kind"])}
    return SamplingParams(**given)


def _last_of_aborted(call: Call, newest: Mapping[int, CompletionOutput]) -> RequestOutput:
    """Return the last output of an aborted request, without an id: its completions that have not ended, now with
    finish_reason "abort".

    newest: last output of each completion so far, by index; a missing one is empty. If the request is for deltas, none
    has new text or tokens.
    """
    nothing_new: dict[str, Any] = {}
    if call.params.get("output_kind") is RequestOutputKind.DELTA:
        arrays = dict.fromkeys(("hidden_states", "captured", *SAMPLING_FIELDS))
        nothing_new = {"text": "", "token_ids": [], "logprobs": None, **arrays}
    known = [newest.get(index, CompletionOutput(index, "", [])) for index in range(call.params.get("n", 1))]
    running = [each for each in known if not each.finished()]
    outputs = [dataclasses.replace(each, finish_reason="abort", **nothing_new) for each in running]
    return RequestOutput("", call.prompt, call.prompt_token_ids, outputs, finished=True)


class Replica:
    """Ray Serve replica with one engine. It starts the engine's other hosts."""

    def __init__(self, options: dict[str, Any]):
        options = dict(options)
        self._nodes, self._folder = [], None
        if options.get("nnodes", 1) > 1:
            self._folder = tempfile.TemporaryDirectory()
            key = secrets.token_hex(32)
            options["master_addr"] = ray.util.get_node_ip_address()
            options["cluster_key_file"] = _write_key(self._folder.name, key)
            self._nodes = [_start_node(rank, options, key) for rank in range(1, options["nnodes"])]
        self._engine = AsyncLLM(**options)

    async def describe(self) -> str:
        """Returns the engine's resolved config and its process id, as JSON."""
        return json.dumps({"config": dataclasses.asdict(self._engine.inputs.config), "pid": os.getpid()})

    async def generate(self, call: bytes) -> AsyncIterator[bytes]:
        """Yield Answers to a Call, all of them encoded as msgpack. A RequestError comes as the `error` of the last
        answer; EngineDeadError is raised.
        """
        asked = _decode_call(call)
        prompt = {"prompt": asked.prompt, "prompt_token_ids": asked.prompt_token_ids, "cache_salt": asked.cache_salt}
        prompt = {name: value for name, value in prompt.items() if value is not None}
        options = dataclasses.replace(asked.options, arrival=time.monotonic() - asked.age)
        try:
            outputs = self._engine.stream(prompt, _unpack_params(asked.params), options=options)
            async with contextlib.aclosing(outputs):  # pyright: ignore[reportArgumentType]
                async for output in outputs:
                    yield _encode(Answer(output))
        except OverloadedError as error:
            yield _encode(Answer(error=str(error), param=error.param, retry_after=error.retry_after))
        except RequestError as error:
            yield _encode(Answer(error=str(error), param=error.param))

    async def utility(self, name: str, arguments: list[Any]) -> Any:
        return await self._engine.utility(name, *arguments)

    async def check_health(self) -> None:
        """Raises if the engine is unhealthy; Ray then replaces the replica."""
        await self._engine.check_health()

    def __del__(self):
        if engine := getattr(self, "_engine", None):
            engine.shutdown()


class RayEngine:
    """EngineClient over Ray Serve replicas."""

    def __init__(self, replicas: Any, inputs: InputProcessor, num_attempts: int):
        self.inputs = inputs
        self.errored = False
        self._replicas = replicas
        self._num_attempts = num_attempts
        self._running: dict[str, Any] = {}
        self._aborted: set[str] = set()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request, as EngineClient.stream, except that images and videos are refused with
        RequestError.

        A request whose replica is lost is tried on another one, at most `num_attempts` in all; EngineDeadError once
        there is output, and after the last attempt.
        """
        params = self.inputs.default_sampling_params() if sampling_params is None else sampling_params
        options = options or RequestOptions()
        prepared = self.inputs.prepare(prompt, params, request_id=request_id, options=options)
        if prepared.request_id in self._running:
            raise RequestError(f"request_id {prepared.request_id!r} is in use", param="request_id")
        if prepared.requests[0].media is not None:
            raise RequestError("pictures and videos are not supported over Ray Serve", param="multi_modal_data")
        salt = prepared.requests[0].cache_salt
        ids = prepared.requests[0].prompt_token_ids.tolist()
        call = Call(ids, _pack_params(params), prepared.prompt, salt, options)
        try:
            async for output in self._attempts(prepared.request_id, call):
                output.request_id = prepared.request_id
                yield output
        finally:
            self._running.pop(prepared.request_id, None)
            self._aborted.discard(prepared.request_id)

    def pool(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """Raises RequestError. Never called, since Ingress refuses pooling models."""
        raise RequestError("replicas do not serve pooling models yet")

    async def abort(self, request_id: str) -> None:
        """Aborts a request of this ingress: its stream ends with an output whose finish_reason is "abort"."""
        if (stream := self._running.get(request_id)) is not None:
            self._aborted.add(request_id)
            stream.cancel()

    async def check_health(self) -> None:
        """Raises EngineDeadError if no replica answers."""
        try:
            await self._replicas.describe.remote()
        except RayError as error:
            raise EngineDeadError("no replica answers") from error

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Call a utility of one of the replicas, whichever Ray picks, so that orders need a single replica. Raises its
        errors, and EngineDeadError if the replica is lost.
        """
        try:
            return await self._replicas.utility.remote(name, list(arguments))
        except RayTaskError as error:  # Ray's own class, derived from that of the cause as well
            raise error.cause from None
        except RayError as error:
            raise EngineDeadError("the replica was lost") from error

    def text_spans(self) -> list[tuple[float, float, int]]:
        """Return an empty list: text is made on the replicas, each with its own clock."""
        return []

    async def _attempts(self, request_id: str, call: Call) -> AsyncIterator[RequestOutput]:
        for attempt in range(self._num_attempts):
            call.age = time.monotonic() - call.options.arrival
            stream = self._replicas.options(stream=True).generate.remote(_encode(call))
            self._running[request_id] = stream
            finished, newest = False, dict[int, CompletionOutput]()
            try:
                async for answer in stream:
                    output = _output(_decode_answer(answer))
                    finished = output.finished
                    newest |= {each.index: each for each in output.outputs}
                    yield output
                return
            except (GeneratorExit, asyncio.CancelledError):
                stream.cancel()
                raise
            except RayError as error:
                if finished:  # lost between the last output and the end of the stream
                    return
                if request_id in self._aborted:  # Ray's error for a stream that was cancelled
                    yield _last_of_aborted(call, newest)
                    return
                if isinstance(error, RayTaskError) and isinstance(error.cause, RequestError):
                    raise error.cause from None
                if newest or attempt + 1 == self._num_attempts:
                    raise EngineDeadError("the replica was lost") from error


@serve.ingress()
class Ingress:
    """HTTP deployment; it gets the served model's config from a replica."""

    async def __init__(self, replicas: Any, options: dict[str, Any], server: ServerConfig, num_attempts: int):
        config = ResolvedConfig(**json.loads(await replicas.describe.remote())["config"])
        inputs = input_processor(open_model(EngineConfig.from_options(**options)), config)
        if inputs.pooling is not None:
            raise ConfigError("runner", config.runner, "generate: replicas do not serve pooling models yet")
        self._app = create_app(RayEngine(replicas, inputs, num_attempts), server)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """Creates a Ray Serve application from options of EngineConfig, ServerConfig and RayConfig, by name.

    Values may be texts, as from `serve run`: one that is JSON is read as JSON. Nothing is started yet. Raises
    ConfigError for an invalid option, for enable_log_requests, enable_batch_api and profiler_config, which are not
    served here, and for enable_admin with several replicas.
    """
    chosen: list[dict[str, Any]] = []
    rest = {name: _read(value) for name, value in arguments.items()}
    for cls in (ServerConfig, RayConfig):
        names = {field.name for field in dataclasses.fields(cls)} & set(rest)
        chosen.append({name: rest.pop(name) for name in names})
    server, ray_config = ServerConfig(**chosen[0]), RayConfig(**chosen[1])
    config = EngineConfig.from_options(**rest)
    if server.enable_log_requests:
        raise ConfigError("enable_log_requests", True, "False under Ray Serve, whose proxies log requests")
    if server.enable_batch_api:
        raise ConfigError("enable_batch_api", True, "False under Ray Serve, whose ingresses run no batches")
    if server.enable_admin and ray_config.max_replicas > 1:
        allowed = f"False with max_replicas {ray_config.max_replicas}: each order would reach one replica of them"
        raise ConfigError("enable_admin", True, allowed)
    if config.profiler_config is not None:
        raise ConfigError("profiler_config", config.profiler_config, "None under Ray Serve, with its several replicas")
    target = ray_config.target_ongoing_requests or config.max_num_seqs or 32
    host = {"CPU": ray_config.num_cpus, "GPU": ray_config.num_gpus, **ray_config.resources}
    host = {name: count for name, count in host.items() if count}
    placement: dict[str, Any] = {"ray_actor_options": _actor_options(ray_config)}
    if config.nnodes > 1:
        placement |= {
            "placement_group_bundles": [host] * config.nnodes,
            "placement_group_strategy": ray_config.placement_strategy,
        }
    replicas = serve.deployment(
        Replica,
        name="Replica",
        autoscaling_config={
            "min_replicas": ray_config.min_replicas,
            "max_replicas": ray_config.max_replicas,
            "target_ongoing_requests": target,
        },
        # The engine has its own queue and batches the requests.
        max_ongoing_requests=5 * target,
        health_check_period_s=2,
        **placement,
    )
    ingress = serve.deployment(
        Ingress, name="Ingress", num_replicas=ray_config.num_ingresses, max_ongoing_requests=10_000
    )
    return ingress.bind(replicas.bind(rest), rest, server, ray_config.num_attempts)


class Node:
    """Actor for another host of a replica's engine."""

    def __init__(self, words: list[str], key: str):
        self._folder = tempfile.TemporaryDirectory()
        words = [*words, "--cluster-key-file", _write_key(self._folder.name, key)]
        # A separate process, since it ends with the engine.
        self._process = subprocess.Popen([sys.executable, "-m", "jaxengine", "worker", *words])

    def __del__(self):
        self._process.kill()


def _start_node(rank: int, options: Mapping[str, Any], key: str) -> Any:
    """Start host `rank` of the engine, in bundle `rank` of this replica's placement group; return its actor.

    options: of EngineConfig. key: the cluster's secret. Does not wait until the host is there. A replica without a
    placement group fails an assertion.
    """
    words = ["--node-rank", str(rank)]
    for name in ("nnodes", "master_addr", "master_port", "cluster_timeout"):
        if name in options:
            words += ["--" + name.replace("_", "-"), str(options[name])]
    group = ray.util.get_current_placement_group()
    assert group is not None, "a replica of several hosts has a placement group"
    bundle = group.bundle_specs[rank]
    known = {"CPU": "num_cpus", "GPU": "num_gpus"}
    return (
        ray.remote(Node)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            resources={name: count for name, count in bundle.items() if name not in known},
            **{known[name]: count for name, count in bundle.items() if name in known},
        )
        .remote(words, key)
    )


def _write_key(folder: str, key: str) -> str:
    path = os.path.join(folder, "key")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return path


def _actor_options(config: RayConfig) -> dict[str, Any]:
    return {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus, "resources": dict(config.resources)}


def _read(value: Any) -> Any:
    """Parses a text as JSON; returns anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _output(answer: Answer) -> RequestOutput:
    if answer.output is not None:
        return answer.output
    text = answer.error or ""
    if answer.retry_after is not None:
        raise OverloadedError(text, retry_after=answer.retry_after)
    raise RequestError(text, param=answer.param)
