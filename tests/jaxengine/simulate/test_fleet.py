"""Fleets: a replica alone is the simulated engine, no request is lost, and routers choose as they say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxengine.commands.cli import main
from jaxengine.simulate.costs import HostCosts
from jaxengine.simulate.fleet import ROUTERS, FleetOptions
from jaxengine.simulate.setup import open_setup
from jaxengine.simulate.synthetic import synthetic
from tests.jaxengine.server.plain_routing import ReplicaState, choose, index_of

OPTIONS = {"model": "smollm2-135m", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 2048}


@pytest.fixture(scope="module")
def setup():
    with open_setup(OPTIONS, "l4", None, 0.5, HostCosts(dispatch=0.02)) as found:
        yield found


def test_a_fleet_of_one_is_the_engine(setup):
    trace = synthetic("agents", 40, 20.0, 2048, scale=0.2)
    alone, fleet = setup.run(trace), setup.run_fleet(trace, FleetOptions(1), "prefix")
    assert fleet.num_steps == alone.stats.num_steps and len(fleet.e2e) == 40
    assert fleet.num_prefix_hits == alone.num_prefix_hits > 0 and fleet.num_published > 0
    for name in ("first_token", "e2e", "mean_interval"):
        assert np.array_equal(getattr(fleet, name), getattr(alone, name)), name
    assert fleet.queued[0] == pytest.approx(alone.e2e.sum() / fleet.seconds)


def test_requests_of_a_dead_replica_fail_or_run_elsewhere(setup):
    trace = synthetic("agents", 60, 60.0, 2048, scale=0.2)
    for replicas, deaths in ((3, 2), (1, 1)):
        options = FleetOptions(replicas, deaths, restart_seconds=5.0, seed=4)
        found = setup.run_fleet(trace, options, "least_load")
        assert len(found.e2e) + found.failed == 60 and found.failed and found.retried and not found.refused
        again = setup.run_fleet(trace, options, "least_load")
        assert np.array_equal(again.e2e, found.e2e) and again.retried == found.retried
        # With none left, requests wait for the next replica.
        assert (found.first_token.max() > 4.0) == (replicas == 1)
    drained = setup.run_fleet(trace, FleetOptions(3, drains=2, restart_seconds=5.0), "least_load")
    assert len(drained.e2e) == 60 and not drained.failed + drained.retried
    long = replace(trace.requests[0], num_prompt=4000)
    refused = setup.run_fleet(replace(trace, requests=(long, *trace.requests[1:])), FleetOptions(2), "round_robin")
    assert len(refused.e2e) == 59 and "4000 tokens" in refused.refused[0]


def test_the_command_compares_routers(tmp_path, capsys):
    file = tmp_path / "out.json"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    fleet = ["--replicas=4", "--deaths=1", "--drains=1", "--restart-seconds=1", "--publish-seconds=0.1"]
    trace = ["--requests=80", "--rate=80", "--scale=0.2", "--trace-seed=3", "--ttft=1"]
    assert main(["simulate", "agents", "--chips=l4", *words, *fleet, *trace, f"--json={file}"]) == 0
    found = {row["router"]: row for row in json.loads(file.read_text())["routers"]}
    assert list(found) == list(ROUTERS)
    hits = {name: row["prefix_hit_rate"] for name, row in found.items()}
    assert hits["prefix"] > 1.3 * max(hits["round_robin"], hits["least_load"]) > 0
    for row in found.values():
        assert row["requests"] + row["failed"] == 80 and row["load"]["queued"]["most"] >= row["load"]["queued"]["mean"]
    shown = capsys.readouterr().out
    assert "4 replicas, which publish their caches after 0.1 s" in shown and "1 die and 1 drain" in shown


def cost(replica: ReplicaState, digests: list[int], adapter: str | None) -> float:
    known = max((at for at, digest in enumerate(digests, 1) if digest in replica.digests), default=0)
    return replica.queue + 8.0 * (1 - known / len(digests) + (adapter is not None and not replica.adapters))


def test_the_cheapest_replica_is_chosen():
    """Against the costs of `choose`, counted one by one."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        digests = rng.integers(0, 1 << 60, 6).tolist()
        replicas = []
        for index in range(5):
            held = frozenset(digest for digest in digests if rng.random() < 0.4)
            adapters = {"own": b""} if rng.random() < 0.5 else {}
            replicas.append(ReplicaState(str(index), int(rng.integers(12)), held, adapters, rng.random() < 0.3))
        adapter = "own" if rng.random() < 0.5 else None

        found = choose(digests, None, adapter, replicas)
        costs = [cost(each, digests, adapter) for each in replicas]
        allowed = [index for index in range(5) if not replicas[index].draining] or list(range(5))
        assert found in allowed and costs[found] == pytest.approx(min(costs[index] for index in allowed))
    idle = [ReplicaState(str(index)) for index in range(9)]
    places = [choose([], f"session {index}", None, idle) for index in range(40)]
    assert len(set(places)) > 5
    fewer = [each for each in idle if each.name != str(places[0])]
    moved = [fewer[choose([], f"session {index}", None, fewer)].name for index in range(40)]
    assert all(str(before) == after for before, after in zip(places, moved, strict=True) if before != places[0])
    assert choose([1], None, None, [replace(idle[0], queue=9), replace(idle[1], draining=True)]) == 0
    with pytest.raises(ValueError, match="no replicas"):
        choose([], None, None, [])


def test_simple_routers_take_turns():
    replicas = index_of(
        [ReplicaState(f"{place}", queue, draining=queue == 7) for place, queue in enumerate((0, 7, 0, 1))]
    )
    chosen = []
    for name in ("round_robin", "least_load"):
        router = ROUTERS[name]()
        chosen.append([router([], "", replicas) for _ in range(4)])
    assert chosen == [[0, 2, 3, 0], [0, 2, 0, 2]]
