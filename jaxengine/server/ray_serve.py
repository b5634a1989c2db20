"""Engines as Ray Serve replicas behind one HTTP endpoint: `serve run jaxengine.server.ray_serve:app model=...`.

A replica is an engine with the whole HTTP application; an ingress chooses one for each request by its prefix, session
and adapter and by the queues (jaxengine.server.base.routing). Ray adds or removes replicas by the length of the queues.
When a replica is lost, answers that had begun fail, and requests without output are retried on another one. An engine
over several hosts is one replica with a placement group that has a bundle on each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.command import check_together
from jaxengine.server.ray.ingress import Ingress
from jaxengine.server.ray.options import RayConfig, refuse_without_meaning
from jaxengine.server.ray.replica import Replica
from jaxengine.server.ray.request_router import Router
from jaxengine.server.ray.store import Store

# Requests per replica, running and waiting, that Ray aims at without target_ongoing_requests and max_num_seqs.
_TARGET = 32
# A replica's largest number of requests, running and waiting, is this times Ray's target: the engine has a queue.
_MOST_PER_TARGET = 5
_MOST_REQUESTS = 10_000
# Ray's target divided by this is the default of routing_imbalance.
_TARGET_PER_IMBALANCE = 4


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """Return a Ray Serve application for options of EngineConfig, ServerConfig and RayConfig, by name. Starts nothing.

    Values may be texts, as from `serve run`; a text that is valid JSON is replaced by its JSON value. Raises
    ConfigError for an invalid option, for profiler_config, for server options that have no meaning here
    (`refuse_without_meaning`), and for enable_admin with several replicas.
    """
    chosen: list[dict[str, Any]] = []
    rest = {name: _read(value) for name, value in arguments.items()}
    for cls in (ServerConfig, RayConfig):
        names = {field.name for field in dataclasses.fields(cls)} & set(rest)
        chosen.append({name: rest.pop(name) for name in names})
    server, ray_config = ServerConfig(**chosen[0]), RayConfig(**chosen[1])
    config = EngineConfig.from_options(**rest)
    refuse_without_meaning(chosen[0], ray_config.max_replicas)
    check_together(server, config)
    if config.profiler_config is not None:
        raise ConfigError("profiler_config", config.profiler_config, "None under Ray Serve, with its several replicas")
    target = ray_config.target_ongoing_requests or config.max_num_seqs or _TARGET
    imbalance, store = ray_config.routing_imbalance, None
    if imbalance is None:
        imbalance = target / _TARGET_PER_IMBALANCE
    if ray_config.max_replicas > 1:
        store = serve.deployment(
            Store, name="Store", max_ongoing_requests=_MOST_REQUESTS, ray_actor_options={"num_cpus": 0}
        ).bind(server.store_bounds())
    replicas = serve.deployment(
        Replica,
        name="Replica",
        autoscaling_config={
            "min_replicas": ray_config.min_replicas,
            "max_replicas": ray_config.max_replicas,
            "target_ongoing_requests": target,
            "upscale_delay_s": ray_config.upscale_delay,
            "downscale_delay_s": ray_config.downscale_delay,
        },
        max_ongoing_requests=_MOST_PER_TARGET * target,
        max_queued_requests=server.max_num_queued_reqs or -1,
        health_check_period_s=2,
        request_router_config={
            "request_router_class": Router,
            "request_router_kwargs": {"imbalance": imbalance, "period": ray_config.routing_period},
            "request_routing_stats_period_s": ray_config.routing_period,
        },
        **({"graceful_shutdown_timeout_s": server.shutdown_timeout} if server.shutdown_timeout else {}),
        **_placement(ray_config, config.nnodes),
    ).bind(rest, server, ray_config.routing_digest_bytes, store)
    ingress = serve.deployment(
        Ingress, name="Ingress", num_replicas=ray_config.num_ingresses, max_ongoing_requests=_MOST_REQUESTS
    )
    return ingress.bind(replicas, rest, server, ray_config, store)


def _placement(config: RayConfig, num_nodes: int) -> dict[str, Any]:
    """Return Ray's options for the resources of a replica. For num_nodes > 1 they include a placement group with one
    bundle for each host.
    """
    needs = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus, "resources": dict(config.resources or {})}
    placement: dict[str, Any] = {"ray_actor_options": needs}
    if num_nodes > 1:
        host = {"CPU": config.num_cpus, "GPU": config.num_gpus, **(config.resources or {})}
        bundle = {name: count for name, count in host.items() if count}
        placement |= {
            "placement_group_bundles": [bundle] * num_nodes,
            "placement_group_strategy": config.placement_strategy,
        }
    return placement


def _read(value: Any) -> Any:
    """Return the JSON value of a text. A text that is not valid JSON, and a value that is not a text, is returned
    unchanged.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value
