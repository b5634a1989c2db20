"""The command `jaxengine serve`. Heavy imports are made when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys

from jaxengine.config.base.files import is_writable_folder, named_path
from jaxengine.config.command_line import add_options, given_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model, looks_like_model
from jaxengine.logs import log_as_json
from jaxengine.server.base.certificates import read_context
from jaxengine.server.base.options import ServerConfig

_NEEDED = ("fastapi", "uvicorn", "zmq", "grpc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine serve` to a parser, and set `run` as its function."""
    add_model(parser)
    add_options(parser, "server options", ServerConfig, short={"api_server_count": "-asc"})
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the server until it ends; return the exit status of Supervisor.run, or 2, after printing an error, if a
    package that serving needs is not installed.

    args: options of `add_arguments`. With enable_batch_api the folder batch_storage_dir is created; with log_format
    "json" this process logs JSON. Raises ConfigError, before any process is started, for invalid options and for files
    of keys or TLS that cannot be used.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needed = f"serving needs {', '.join(missing)}: pip install 'jaxengine[serve]', or '.[serve]' in a clone"
        print(f"jaxengine: error: {needed}", file=sys.stderr)
        return 2
    from jaxengine.server.base.given_middleware import given_middleware
    from jaxengine.server.batch.store import BatchStore
    from jaxengine.server.observe.spans import check_endpoint
    from jaxengine.server.processes.supervisor import Supervisor

    server = ServerConfig(**given_options(args, ServerConfig))
    options = given_options(args, EngineConfig)
    if "model" not in options:
        _check_words(server)
    if server.log_format == "json":
        log_as_json("supervisor")
    engine = EngineConfig.from_options(**options)
    if engine.profiler_config is not None and not server.enable_admin:
        problem = "profiler_config is given without enable_admin, and /start_profile is a route of operators"
        raise ConfigError.because("profiler_config", problem, "give --enable-admin and --admin-key-file")
    check_together(server, engine)
    if server.enable_batch_api:
        BatchStore.of(server)
    # Fails for unreadable files before the model is loaded.
    server.api_keys()
    server.admin_keys()
    check_endpoint(server.otlp_traces_endpoint)
    read_context(server)
    given_middleware(server.middleware)
    return Supervisor(server, engine).run()


def _check_words(server: ServerConfig) -> None:
    """Raise ConfigError if the last of several words of a list's flag names a model, for a command without a model: the
    flag takes all words that follow it.
    """
    for field in dataclasses.fields(server):
        words = getattr(server, field.name)
        if field.metadata.get("nargs") == "+" and len(words) > 1 and looks_like_model(words[-1]):
            problem = f"{field.name} has taken {words[-1]!r}, and no model is given"
            raise ConfigError.because(field.name, problem, "give the model before that flag, or as --model")


def check_together(server: ServerConfig, engine: EngineConfig) -> None:
    """Raise ConfigError for server options that need an engine option which is not given (batch_priority: priority
    scheduling; those of adapters: enable_lora), for invalid values of the latter, for a folder that cannot be used, and
    for a reasoning parser that the engine has instead of the server.
    """
    from jaxengine.server.adapters.adapter_sources import AdapterSources
    from jaxengine.server.adapters.lora import read_modules
    from jaxengine.server.adapters.lora_routes import LoraRoutes
    from jaxengine.server.base.names import names_of

    if server.batch_priority is not None and engine.scheduling_policy != "priority":
        problem = f"batch_priority is {server.batch_priority}, and scheduling_policy is {engine.scheduling_policy!r}"
        raise ConfigError.because("batch_priority", problem, "give --scheduling-policy priority")
    for name in ("lora_modules", "lora_root", "lora_dirs", "lora_hub_owners", "lora_routes"):
        if getattr(server, name) and not engine.enable_lora:
            raise ConfigError.because(name, f"{name} is given without enable_lora", "give --enable-lora too")
    engine.structured_outputs_config.check_for_server()
    for name, fits in (("lora_root", os.path.isdir), ("weight_upload_dir", is_writable_folder)):
        if (value := getattr(server, name)) is not None and not (value and fits(named_path(name, value))):
            raise ConfigError(name, value, "a folder that is there and can be used")
    read_modules(server.lora_modules)
    AdapterSources(server)
    LoraRoutes.of(server, names_of(engine.model, server))
