"""Modules of vLLM under their names: `from jaxengine.lora.request import LoRARequest` is `from jaxengine import
LoRARequest`.

The modules listed in MODULES have no files. An import finder, which runs after Python's own finders, creates such a
module when it is imported, and the module looks up its names when they are used. A name of vLLM that has no counterpart
raises ImportError, whose message says what to use instead. Type checkers see no such modules: typed programs import
from `jaxengine`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ROOT = "jaxengine"
_OUTPUTS = """
    RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput
    ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput
"""
_INPUTS = "PromptType TextPrompt TokensPrompt"

# Module -> its names, separated by spaces: NAME for one of `jaxengine`, or NAME=module:attribute, in which attribute
# may be left out if it equals NAME.
MODULES: dict[str, str] = {
    "config": (
        "CompilationConfig CompilationLevel CompilationMode PoolerConfig "
        "SpeculativeConfig=jaxengine.config.features.speculation: "
        "StructuredOutputsConfig=jaxengine.config.features.structured_outputs_config:"
    ),
    "config.compilation": "CompilationConfig CompilationLevel CompilationMode",
    "distributed": "cleanup_dist_env_and_memory=jaxengine.api.example_helpers:",
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.llm": "LLM",
    "exceptions": "VLLMValidationError=jaxengine:RequestError",
    "inputs": _INPUTS,
    "inputs.data": _INPUTS,
    "logger": "init_logger=logging:getLogger",
    "logprobs": "Logprob FlatLogprobs",
    "lora.request": "LoRARequest",
    **dict.fromkeys(
        ("model_executor.models.deepseek_ocr", "model_executor.models.unlimited_ocr"),
        "NGramPerReqLogitsProcessor=jaxengine.config.features.logits_processors:",
    ),
    "multimodal.image": "convert_image_mode=jaxengine.media.fetching.pil_images:",
    "multimodal.utils": (
        "fetch_image=jaxengine.media.fetching.pil_images: encode_image_url=jaxengine.media.fetching.pil_images:"
    ),
    "outputs": _OUTPUTS,
    "platforms": "current_platform=jaxengine.api.example_helpers:",
    "pooling_params": "PoolingParams",
    "renderers.chat_utils": "load_chat_template=jaxengine.config.inputs.chat_template:read_chat_template",
    "sampling_params": (
        "SamplingParams RequestOutputKind BeamSearchParams StructuredOutputsParams RepetitionDetectionParams"
    ),
    "transformers_utils.repo_utils": "hf_api=huggingface_hub:HfApi",
    "utils": "FlexibleArgumentParser",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.network_utils": "get_open_port=jaxengine.api.example_helpers:",
    "utils.print_utils": "print_embeddings=jaxengine.api.example_helpers:",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.exceptions": "EngineDeadError",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.reader": (
        "Metric=jaxengine.engine.stats.metric_types: Counter=jaxengine.engine.stats.metric_types: "
        "Gauge=jaxengine.engine.stats.metric_types: Histogram=jaxengine.engine.stats.metric_types: "
        "Vector=jaxengine.engine.stats.metric_types:"
    ),
}
# Packages that contain MODULES. Most of them have no names themselves.
PACKAGES = frozenset(
    ".".join(parts[:count]) for name in MODULES for parts in [name.split(".")] for count in range(1, len(parts))
)

_SEE = "docs/coming_from_vllm.md has what is refused"
# Module or module.Name of vLLM, or a package around it -> advice on what to use instead. The longest match counts.
NOT_BUILT: dict[str, str] = {
    "ModelRegistry": "jaxengine.register_model adds a model of your own",
    "assets": "vLLM keeps these images, videos and sounds; open a file of yours with PIL",
    "benchmarks": "jaxengine bench measures, docs/serving.md",
    "config": "jaxengine.EngineArgs has all options; dicts of fields do for those with structure",
    "config.KVTransferConfig": "kv_transfer_config takes a dict of its fields",
    "config.kv_transfer": "kv_transfer_config takes a dict of its fields",
    "distributed": "exchanges of devices are XLA's; kv_transfer_config hands KV pages over, update_weights weights",
    "engine": _SEE,
    "entrypoints": "jaxengine serve runs the server; jaxengine.server.ray_serve runs it in Ray Serve",
    "exceptions": "RequestError is that of a bad request",
    "env_override": "no engine option is read from the environment",
    "envs": "no engine option is read from the environment",
    "forward_context": "jaxengine.register_model adds a model of your own",
    "initialize_ray_cluster": "nnodes and jaxengine worker run an engine on several hosts",
    "inputs": _SEE,
    "lora": "jaxengine.LoRARequest names an adapter",
    "model_executor": "jaxengine.register_model adds a model of your own",
    "multimodal": "prompts take PIL images and numpy arrays, messages take addresses; docs/media.md",
    "platforms": "jax.devices() has the devices",
    "plugins": "jaxengine.register_model adds a model of your own",
    "pooling_params": "what is built: docs/pooling_models.md",
    "reasoning": "parsers have vLLM's names, docs/parsers.md",
    "renderers": "the option chat_template takes a file or a template",
    "sampling_params": "what is built: docs/sampling_params.md",
    "third_party": _SEE,
    "tokenizers": "LLM.get_tokenizer() returns the tokenizer of transformers",
    "tool_parsers": "parsers have vLLM's names, docs/parsers.md",
    "transformers_utils": "transformers and huggingface_hub have these functions",
    "usage": "no statistics of usage are collected",
    "utils": "vLLM's helpers are not part of the engine's interface; the standard library and numpy have most of them",
    "v1": _SEE,
    "v1.metrics": "LLM.get_metrics() returns Counter, Gauge, Vector and Histogram",
    "v1.sample": "jaxengine.LogitsProcessor, docs/sampling_params.md#logits-processors",
    "v1.worker": "jaxengine.LogitsProcessor, docs/sampling_params.md#logits-processors",
}


class NotBuiltImportError(ModuleNotFoundError):
    """Error of importing a module or name that vLLM has and this engine does not."""


def look_up(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` function of a module in MODULES. It imports a name from the module that defines it, and
    stores it in the module, on first use. It raises NotBuiltImportError for a name that vLLM has and this engine does
    not, AttributeError for any other unknown name.
    """
    homes = _homes(module.removeprefix(f"{_ROOT}."))

    def find(name: str) -> Any:
        """Return the value of a name of the module, and store it there. Raises the errors of `look_up`."""
        if name not in homes:
            refuse(module, name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        value = getattr(import_module(home), attribute or name)
        setattr(sys.modules[module], name, value)
        return value

    return find


def refuse(module: str, name: str) -> None:
    """Raise NotBuiltImportError if vLLM has, or may have, `name` in a module and this engine does not. Does nothing for
    submodules of this engine, and for names with leading double underscores, which Python itself looks up.

    module: full name of the module, which must be imported. name: one that the module does not define, which the caller
    has checked.
    """
    full = f"{module}.{name}"
    inside = full.removeprefix(f"{_ROOT}.")
    if name.startswith("__") or is_module(inside) or (advice := _advice(inside)) is None:
        return
    if PathFinder.find_spec(full, getattr(sys.modules[module], "__path__", ())) is None:
        raise NotBuiltImportError(f"{module} has no {name}: {advice}", name=module)


def is_module(name: str) -> bool:
    """Return whether a dotted name below `jaxengine` is one of vLLM's modules or packages that `install` makes
    importable.
    """
    return name in MODULES or name in PACKAGES


def install() -> None:
    """Append a finder to `sys.meta_path`, so that `import` finds the modules in MODULES. Does nothing if one is
    installed.
    """
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder, Loader):
    """Import finder and loader of the modules in MODULES. It runs after Python's own finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in MODULES or of a package around one; None for other modules. Raises
        NotBuiltImportError for a module that vLLM has and this engine does not.
        """
        root, _, name = fullname.partition(".")
        if root != _ROOT or not name:
            return None
        if is_module(name):
            return ModuleSpec(fullname, self, is_package=True)  # asked for its submodules, too, it refuses them by name
        if (advice := _advice(name)) is not None:
            raise NotBuiltImportError(f"there is no {fullname}: {advice}", name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Set `__getattr__`, `__all__` and `__dir__` of a new module, so that its names are looked up when they are
        used, and its docstring.
        """
        names = sorted(_homes(module.__name__.removeprefix(f"{_ROOT}.")))
        module.__doc__ = f"Names that vLLM has in this module; see {__name__}."
        vars(module).update(__getattr__=look_up(module.__name__), __all__=names, __dir__=lambda: names)


def _homes(module: str) -> dict[str, str]:
    """Return, for each name of a module in MODULES, where it is defined: "module:attribute", or "module:" if the
    attribute has the same name.
    """
    words = (word.partition("=") for word in MODULES.get(module, "").split())
    return {name: home or f"{_ROOT}:{name}" for name, _, home in words}


def _advice(name: str) -> str | None:
    """Return the text in NOT_BUILT for the longest key that is `name` or a package around it; None if there is none."""
    parts = name.split(".")
    begins = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((NOT_BUILT[each] for each in begins if each in NOT_BUILT), None)
