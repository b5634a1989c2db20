"""Admin service: inspection and control by operators, whom KeyInterceptor has authenticated."""

from __future__ import annotations

import grpc.aio

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.adapters.lora import load_from_root, unload
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import admin_pb2 as pb
from jaxengine.server.grpc.service import OpenCalls
from jaxengine.server.grpc.weights import WeightMethods
from jaxengine.version import __version__

API_VERSION = "jaxengine.v1"
MAX_IDS = 1024

Context = grpc.aio.ServicerContext


class AdminService(WeightMethods):
    """Implementation of admin.proto. Its methods have the names of the proto's and raise exceptions that
    status.status_of converts.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig, model_names: tuple[str, ...], calls: OpenCalls):
        self._engine = engine
        self._config = config
        self._model_names = model_names
        self._calls = calls

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        """Return versions, parallel sizes and limits of the engine. Raises EngineDeadError if it cannot answer."""
        config = self._engine.inputs.config
        status = await self._engine.utility("status")
        return pb.ServerInfo(
            engine_version=__version__,
            api_version=API_VERSION,
            parallelism=pb.ParallelismInfo(
                tensor_parallel_size=config.tensor_parallel_size,
                pipeline_parallel_size=config.pipeline_parallel_size,
                data_parallel_size=config.data_parallel_size,
            ),
            max_model_len=config.max_model_len,
            kv_block_size=config.block_size,
            total_kv_blocks=status["pages"]["num_pages"],
            max_running_requests=config.max_num_seqs,
            max_batched_tokens=config.max_num_batched_tokens,
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        """Return the model's names, vocabulary size and eos tokens, and whether it accepts texts."""
        inputs = self._engine.inputs
        name, *aliases = self._model_names
        tokenizer = inputs.tokenizer
        return pb.ModelInfo(
            model_id=inputs.config.model or name,
            served_model_name=name,
            served_model_aliases=aliases,
            vocab_size=inputs.model_config.vocab_size,
            eos_token_ids=list(inputs.eos_token_ids()),
            supports_text_input=tokenizer is not None,
            supports_token_ids_input=True,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.Load:
        """Return the number of requests that run and that wait, the fraction of KV pages in use, 0 to 1, and the number
        of open calls, this one included. Raises EngineDeadError if the engine cannot answer.
        """
        status = await self._engine.utility("status")
        return pb.Load(
            num_requests_running=status["num_running"],
            num_requests_waiting=status["num_waiting"],
            kv_cache_usage=status["kv_usage"],
            num_open_calls=len(self._calls),
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Abort requests by id, without waiting for their ends. Unknown ids are ignored. Raises RequestError unless
        there are 1 to MAX_IDS ids; EngineDeadError.
        """
        count = len(request.request_ids)
        if not 1 <= count <= MAX_IDS:
            raise RequestError(f"request_ids holds {count} ids; allowed: 1 to {MAX_IDS}", param="request_ids")
        for request_id in request.request_ids:
            await self._engine.abort(request_id)
        return pb.AbortResponse()

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Drop cached prefixes and images. `success` is whether both were dropped. Raises EngineDeadError if the engine
        cannot answer.
        """
        done = [await self._engine.utility(name) for name in ("reset_prefix_cache", "reset_mm_cache")]
        return pb.FlushCacheResponse(success=all(done))

    async def LoadLoraAdapter(self, request: pb.LoadLoraAdapterRequest, context: Context) -> pb.LoadLoraAdapterResponse:
        """Load an adapter from a folder in lora_root, and return when it is loaded. Raises RequestError without
        lora_root, for a name that is taken, a path outside lora_root and an unusable adapter, UnknownAdapterError for a
        path at which nothing is, and EngineDeadError.
        """
        await load_from_root(self._engine, self._config, self._model_names, request.lora_name, request.lora_path)
        return pb.LoadLoraAdapterResponse()

    async def UnloadLoraAdapter(
        self, request: pb.UnloadLoraAdapterRequest, context: Context
    ) -> pb.UnloadLoraAdapterResponse:
        """Close an adapter to further requests; those that run with it continue to their ends. Raises RequestError for
        an unknown name, and EngineDeadError.
        """
        await unload(self._engine, request.lora_name)
        return pb.UnloadLoraAdapterResponse()
