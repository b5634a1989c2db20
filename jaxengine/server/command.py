"""`jaxengine serve`: the command line of the server. Heavy imports are made when it runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from jaxengine.config.command_line import add_options, given_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model, looks_like_model
from jaxengine.server.options import ServerConfig

_NEEDED = ("fastapi", "uvicorn", "zmq", "grpc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_options(parser, "server options", ServerConfig, short={"api_server_count": "-asc"})
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the server until it ends; returns the exit status, which is 2 if a package is missing.

    Raises ConfigError for invalid options.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needed = f"serving needs {', '.join(missing)}: pip install 'jaxengine[serve]', or '.[serve]' in a clone"
        print(f"jaxengine: error: {needed}", file=sys.stderr)
        return 2
    from jaxengine.server.observe.spans import check_endpoint
    from jaxengine.server.processes.supervisor import Supervisor

    server = ServerConfig(**given_options(args, ServerConfig))
    options = given_options(args, EngineConfig)
    if "model" not in options and len(server.served_model_name) > 1 and looks_like_model(server.served_model_name[-1]):
        problem = f"served_model_name has taken {server.served_model_name[-1]!r}, and no model is given"
        raise ConfigError.because("served_model_name", problem, "give the model before that flag, or as --model")
    engine = EngineConfig.from_options(**options)
    if engine.profiler_config is not None and not server.enable_admin:
        problem = "profiler_config is given without enable_admin, and /start_profile is a route of operators"
        raise ConfigError.because("profiler_config", problem, "give --enable-admin and --admin-key-file")
    # Fails for unreadable files before the model is loaded.
    server.api_keys()
    server.admin_keys()
    check_endpoint(server.otlp_traces_endpoint)
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(server, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError.because(name, f"{name} {path!r} is not a file", "name a PEM file")
    return Supervisor(server, engine).run()
