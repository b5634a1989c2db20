"""Translates option names, including vLLM's and flat forms, to fields of EngineConfig."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from jaxengine.config import vllm_options
from jaxengine.config.base.errors import ConfigError, printable
from jaxengine.config.base.values import plain
from jaxengine.config.execution.compilation_config import CompilationConfig
from jaxengine.config.execution.placement import with_attention_config
from jaxengine.config.features.gguf_file import with_gguf_file
from jaxengine.config.features.pooler_config import settle_names
from jaxengine.config.features.speculation import settle_speculation
from jaxengine.config.kv.kv_cache import AUTO, CALIBRATE

# Fields of compilation_config that are options of vLLM by themselves, too.
CAPTURE_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def chosen_options(known: Collection[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of EngineConfig's fields that `options` set, by field.

    known: names of the fields. Earlier and flat names are translated; options of vLLM that change nothing here are left
    out, some with a log line. Values are mostly not checked. Raises ConfigError for an option that is unknown or not
    implemented, with the most similar name, and for options that contradict each other.
    """
    for name, value in options.items():
        printable(name, value)
    options, chosen = with_attention_config(with_gguf_file(settle_speculation(settle_names(dict(options))))), {}
    if isinstance(options.get("optimization_level"), Mapping):  # before it was a level, -O was the compilation_config
        options.setdefault("compilation_config", options.pop("optimization_level"))
    for name, value in options.items():
        if name in known:
            chosen[name] = value
        elif name in vllm_options.NAMES:
            vllm_options.settle(name, plain(value))
        elif name not in CAPTURE_SIZES:
            built = {*known, *vllm_options.EARLIER} - vllm_options.WITHOUT_EFFECT
            near = difflib.get_close_matches(name, sorted(built), 1)
            advice = f"did you mean {near[0]}?" if near else "docs/options.md has all of them"
            raise ConfigError.because(name, f"there is no option {name!r}", advice)
    if options.get("calculate_kv_scales") and (scales := chosen.get("kv_cache_scales", AUTO)) not in (AUTO, CALIBRATE):
        problem = f"calculate_kv_scales is given with kv_cache_scales={scales!r}, which measures nothing"
        raise ConfigError.because("calculate_kv_scales", problem, "give one of them")
    if sizes := {name: options[name] for name in CAPTURE_SIZES if options.get(name) is not None}:
        shapes = CompilationConfig.read(chosen.get("compilation_config"))
        for name in sizes:
            if getattr(shapes, name) is not None:
                problem = f"both {name} and compilation_config.{name} are given"
                raise ConfigError.because(name, problem, "give one of them")
        chosen["compilation_config"] = dataclasses.replace(shapes, **sizes)
    return chosen
