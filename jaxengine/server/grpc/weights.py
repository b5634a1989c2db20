"""Methods of the Admin service that pause an engine, put it to sleep and replace its weights."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import admin_pb2 as pb
from jaxengine.server.weights import weights

Context = grpc.aio.ServicerContext

_MODES = {pb.PAUSE_MODE_ABORT: "abort", pb.PAUSE_MODE_WAIT: "wait", pb.PAUSE_MODE_KEEP: "keep"}
_KV = {
    pb.KV_MODE_UNSPECIFIED: "recompute",
    pb.KV_MODE_RECOMPUTE: "recompute",
    pb.KV_MODE_DROP: "drop",
    pb.KV_MODE_KEEP: "keep",
}
# Bits of one number, by safetensors' name of the dtype.
_BITS = {"BOOL": 8, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8} | {
    f"{kind}{bits}": bits
    for kind, sizes in (("F", (16, 32, 64)), ("I", (8, 16, 32, 64)), ("U", (8, 16, 32, 64)))
    for bits in sizes
}


class WeightMethods:
    """Methods of admin.proto that pause an engine, put it to sleep and replace its weights.

    The base class of jaxengine.server.grpc.admin.AdminService, whose constructor sets the attributes. Methods raise
    RequestError and other exceptions that status.status_of converts.
    """

    _engine: EngineClient
    _config: ServerConfig

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Pause the engine and return when that is done. The mode is "abort" if the request has none; cached prefixes
        are dropped unless clear_cache is false. Raises RequestError for an unknown mode, and for "wait" while the
        engine sleeps and has requests; EngineDeadError.
        """
        clear_cache = request.clear_cache or not request.HasField("clear_cache")
        await weights.pause(self._engine, _mode(request.mode, "abort"), clear_cache=clear_cache)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """End a pause. Raises RequestError while the engine sleeps, and EngineDeadError."""
        await weights.resume(self._engine)
        return pb.ResumeResponse()

    async def IsPaused(self, request: pb.IsPausedRequest, context: Context) -> pb.IsPausedResponse:
        """Return whether the engine is paused. Raises EngineDeadError if the engine cannot answer."""
        return pb.IsPausedResponse(is_paused=(await weights.state(self._engine))["is_paused"])

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        """Pause the engine, free device memory and return when that is done. The defaults are level 1, mode "abort" and
        all parts (tags). Raises RequestError for an unknown mode and for arguments that `LLM.sleep` refuses, and
        EngineDeadError.
        """
        level, tags = request.level if request.HasField("level") else 1, list(request.tags) or None
        await weights.sleep(self._engine, level, _mode(request.mode, "abort"), tags, keep_kv=request.keep_kv)
        return pb.SleepResponse()

    async def WakeUp(self, request: pb.WakeUpRequest, context: Context) -> pb.WakeUpResponse:
        """Restore the parts that `tags` name, without tags all parts that Sleep freed; return the parts that still
        sleep. Raises RequestError for tags that `LLM.wake_up` refuses, and EngineDeadError.
        """
        return pb.WakeUpResponse(asleep=await weights.wake_up(self._engine, list(request.tags) or None))

    async def IsSleeping(self, request: pb.IsSleepingRequest, context: Context) -> pb.IsSleepingResponse:
        """Return whether any part sleeps. Raises EngineDeadError if the engine cannot answer."""
        return pb.IsSleepingResponse(is_sleeping=bool((await weights.state(self._engine))["asleep"]))

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        """Replace the weights by those of a folder on the engine's machine; return when they are in use. Raises
        RequestError for an empty path, invalid options and unusable weights, and EngineDeadError; after an error the
        old weights stay.
        """
        found = await weights.update_from_path(self._engine, request.path, _options(request.options))
        return _updated(found)

    async def UpdateWeightsStream(
        self, request: pb.UpdateWeightsPart, rest: AsyncIterator[pb.UpdateWeightsPart], context: Context
    ) -> pb.UpdateWeightsResponse:
        """Replace the weights by those that the call's messages contain, and return when they are in use. The first
        message, `request`, describes the tensors; the others, `rest`, have their bytes.

        Raises RequestError if `request` has no start, and for invalid options, messages and weights; OverloadedError
        for too many uploads; EngineDeadError. After an error the old weights stay.
        """
        if request.WhichOneof("part") != "start":
            raise RequestError("start is missing; the first message must have it", param="start")
        pieces = _file(request.start.tensors, rest)
        options = _options(request.start.options)
        return _updated(await weights.update_from_pieces(self._engine, self._config, pieces, options))

    async def GetWeightInfo(self, request: pb.GetWeightInfoRequest, context: Context) -> pb.WeightInfo:
        """Return the version of the weights, and checksums if requested. Raises RequestError for checksums of weights
        that sleep on request, and EngineDeadError.
        """
        found = await weights.info(self._engine, checksum=request.checksum)
        return pb.WeightInfo(**_version(found["weight_version"]), checksums=found.get("checksums", {}))


def _mode(mode: int, default: str) -> str:
    """Return the name of a PauseMode, given by its number; `default` for UNSPECIFIED. Raises RequestError for an
    unknown number.
    """
    if mode == pb.PAUSE_MODE_UNSPECIFIED:
        return default
    return _known("mode", mode, _MODES)


def _known(field: str, value: int, allowed: dict[Any, str]) -> str:
    """Return `allowed[value]`, the meaning of an enum's number. Raises RequestError, naming `field`, for an unknown
    number.
    """
    if value not in allowed:  # a number that this version's enum does not have
        names = ", ".join(dict.fromkeys(allowed.values()))
        raise RequestError(f"{field} is {value}; allowed: {names}", param=field, value=value)
    return allowed[value]


def _options(options: pb.UpdateOptions) -> weights.UpdateOptions:
    """Return the options of an update. The defaults are mode "keep", kv "recompute" and strict; the target is "draft"
    with `draft`, else "model". Raises RequestError for a chunk_bytes below 1, an unknown mode and an unknown kv.
    """
    given = options.WhichOneof("version")
    if options.HasField("chunk_bytes") and options.chunk_bytes < 1:  # refused before a file of weights is sent
        text = f"chunk_bytes is {options.chunk_bytes}; allowed: to leave it out, and integers from 1"
        raise RequestError(text, param="chunk_bytes", value=options.chunk_bytes)
    return weights.UpdateOptions(
        version=None if given is None else getattr(options, given),
        mode=_mode(options.mode, "keep"),
        kv=_known("kv", options.kv, _KV),
        strict=options.strict or not options.HasField("strict"),
        chunk_bytes=options.chunk_bytes if options.HasField("chunk_bytes") else None,
        target="draft" if options.draft else "model",
    )


def _version(version: str | int) -> dict[str, Any]:
    """Return the weights' version as fields of an answer: weight_version_number for an integer of at most 64 bits, else
    weight_version, a text.
    """
    if isinstance(version, int) and -(2**63) <= version < 2**63:
        return {"weight_version_number": version}
    return {"weight_version": str(version)}


def _updated(found: dict[str, Any]) -> pb.UpdateWeightsResponse:
    """Return the answer to an update. found: the fields of a WeightUpdate; its `version` is removed from the dict."""
    return pb.UpdateWeightsResponse(**_version(found.pop("version")), **found)


async def _file(tensors: Sequence[pb.TensorInfo], parts: AsyncIterator[pb.UpdateWeightsPart]) -> AsyncIterator[bytes]:
    """Yield, in pieces, the safetensors file made of these tensors: the header, then the data of each message of
    `parts`, whose total size is not checked.

    Raises RequestError for a tensor name that occurs twice or is __metadata__, for an unknown dtype, and for a message
    without data.
    """
    header, start = dict[str, Any](), 0
    for each in tensors:
        if each.dtype not in _BITS:
            text = f"dtype of {show_value(each.name)} is {show_value(each.dtype)}; allowed: {', '.join(_BITS)}"
            raise RequestError(text, param="tensors", value=each.dtype)
        if each.name in header or each.name == "__metadata__":
            what = "may not be a tensor's name" if each.name not in header else "is given twice"
            raise RequestError(f"tensors: {show_value(each.name)} {what}", param="tensors", value=each.name)
        end = start + _BITS[each.dtype] // 8 * math.prod(each.shape)
        header[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header).encode()
    yield len(encoded).to_bytes(8, "little") + encoded
    async for part in parts:
        if part.WhichOneof("part") != "data":
            raise RequestError("start may only be in the first message; the others have data", param="start")
        yield part.data
