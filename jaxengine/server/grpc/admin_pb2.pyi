from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]

class KvMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    KV_MODE_UNSPECIFIED: _ClassVar[KvMode]
    KV_MODE_RECOMPUTE: _ClassVar[KvMode]
    KV_MODE_DROP: _ClassVar[KvMode]
    KV_MODE_KEEP: _ClassVar[KvMode]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
KV_MODE_UNSPECIFIED: KvMode
KV_MODE_RECOMPUTE: KvMode
KV_MODE_DROP: KvMode
KV_MODE_KEEP: KvMode

class GetServerInfoRequest(_message.Message):
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    engine_version: str
    api_version: str
    parallelism: ParallelismInfo
    max_model_len: int
    kv_block_size: int
    total_kv_blocks: int
    max_running_requests: int
    max_batched_tokens: int
    def __init__(self, engine_version: _Optional[str] = ..., api_version: _Optional[str] = ..., parallelism: _Optional[_Union[ParallelismInfo, _Mapping]] = ..., max_model_len: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., total_kv_blocks: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ...) -> None: ...

class ParallelismInfo(_message.Message):
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., data_parallel_size: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    model_id: str
    served_model_name: str
    served_model_aliases: _containers.RepeatedScalarFieldContainer[str]
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    supports_text_input: bool
    supports_token_ids_input: bool
    def __init__(self, model_id: _Optional[str] = ..., served_model_name: _Optional[str] = ..., served_model_aliases: _Optional[_Iterable[str]] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., supports_text_input: _Optional[bool] = ..., supports_token_ids_input: _Optional[bool] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    def __init__(self) -> None: ...

class Load(_message.Message):
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    num_open_calls: int
    def __init__(self, num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., num_open_calls: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    def __init__(self) -> None: ...

class LoadLoraAdapterRequest(_message.Message):
    lora_name: str
    lora_path: str
    def __init__(self, lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ...) -> None: ...

class LoadLoraAdapterResponse(_message.Message):
    def __init__(self) -> None: ...

class UnloadLoraAdapterRequest(_message.Message):
    lora_name: str
    def __init__(self, lora_name: _Optional[str] = ...) -> None: ...

class UnloadLoraAdapterResponse(_message.Message):
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class PauseRequest(_message.Message):
    mode: PauseMode
    clear_cache: bool
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ..., clear_cache: _Optional[bool] = ...) -> None: ...

class PauseResponse(_message.Message):
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    def __init__(self) -> None: ...

class IsPausedRequest(_message.Message):
    def __init__(self) -> None: ...

class IsPausedResponse(_message.Message):
    is_paused: bool
    def __init__(self, is_paused: _Optional[bool] = ...) -> None: ...

class SleepRequest(_message.Message):
    level: int
    mode: PauseMode
    tags: _containers.RepeatedScalarFieldContainer[str]
    keep_kv: bool
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ..., tags: _Optional[_Iterable[str]] = ..., keep_kv: _Optional[bool] = ...) -> None: ...

class SleepResponse(_message.Message):
    def __init__(self) -> None: ...

class WakeUpRequest(_message.Message):
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class WakeUpResponse(_message.Message):
    asleep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, asleep: _Optional[_Iterable[str]] = ...) -> None: ...

class IsSleepingRequest(_message.Message):
    def __init__(self) -> None: ...

class IsSleepingResponse(_message.Message):
    is_sleeping: bool
    def __init__(self, is_sleeping: _Optional[bool] = ...) -> None: ...

class UpdateOptions(_message.Message):
    weight_version: str
    weight_version_number: int
    mode: PauseMode
    kv: KvMode
    strict: bool
    chunk_bytes: int
    draft: bool
    def __init__(self, weight_version: _Optional[str] = ..., weight_version_number: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ..., kv: _Optional[_Union[KvMode, str]] = ..., strict: _Optional[bool] = ..., chunk_bytes: _Optional[int] = ..., draft: _Optional[bool] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    path: str
    options: UpdateOptions
    def __init__(self, path: _Optional[str] = ..., options: _Optional[_Union[UpdateOptions, _Mapping]] = ...) -> None: ...

class UpdateWeightsPart(_message.Message):
    start: UpdateWeightsStart
    data: bytes
    def __init__(self, start: _Optional[_Union[UpdateWeightsStart, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UpdateWeightsStart(_message.Message):
    options: UpdateOptions
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    def __init__(self, options: _Optional[_Union[UpdateOptions, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ...) -> None: ...

class TensorInfo(_message.Message):
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    weight_version: str
    weight_version_number: int
    leaves: int
    num_bytes: int
    load_seconds: float
    switch_seconds: float
    def __init__(self, weight_version: _Optional[str] = ..., weight_version_number: _Optional[int] = ..., leaves: _Optional[int] = ..., num_bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., switch_seconds: _Optional[float] = ...) -> None: ...

class GetWeightInfoRequest(_message.Message):
    checksum: bool
    def __init__(self, checksum: _Optional[bool] = ...) -> None: ...

class WeightInfo(_message.Message):
    class ChecksumsEntry(_message.Message):
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    weight_version: str
    weight_version_number: int
    checksums: _containers.ScalarMap[str, str]
    def __init__(self, weight_version: _Optional[str] = ..., weight_version_number: _Optional[int] = ..., checksums: _Optional[_Mapping[str, str]] = ...) -> None: ...
