"""Choice of a replica: prefixes, load, sessions, adapters and drains; and names that stand for adapters by weight."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.config.base.errors import ConfigError
from jaxengine.engine.prefixes import known_prefixes
from jaxengine.server.adapters.lora_routes import LoraRoutes, route_key
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.routing import Replicas, prompt_digests
from tests.jaxengine.server.plain_routing import ReplicaState, choose, index_of, plain_choice
from tests.tables import each_row

A, B, C = (ReplicaState(name) for name in "abc")


def with_state(replica: ReplicaState, **state) -> ReplicaState:
    return ReplicaState(replica.name, **state)


ADAPTER = {"x": b"1"}
# None: any but the last, which is too busy.
CHOICES = {
    "the shortest queue": ([1], None, [with_state(A, queue=3), with_state(B, queue=2), with_state(C, queue=4)], 1),
    "a prefix": ([1, 2], None, [A, B, with_state(C, queue=7, digests={1, 2})], 2),
    "half of one": ([1, 2], None, [A, with_state(B, queue=5, digests={1}), with_state(C, queue=9)], 0),
    "more of it": ([1, 2, 3], None, [with_state(A, digests={1}), with_state(B, digests={1, 2}), C], 1),
    "a late page": ([1, 2, 3], None, [with_state(A, digests={1}), B, with_state(C, digests={3})], 2),
    "a prefix, not at any price": ([1, 2], None, [A, B, with_state(C, queue=9, digests={1, 2})], None),
    "an adapter": ([], "x", [A, with_state(B, queue=7, adapters=ADAPTER), C], 1),
    "an adapter, not at any price": ([], "x", [A, B, with_state(C, queue=9, adapters=ADAPTER)], None),
    "no draining one": ([1], None, [with_state(A, draining=True, digests={1}), with_state(B, queue=9)], 1),
    "draining ones, if all are": ([], None, [with_state(A, draining=True, queue=2), with_state(B, draining=True)], 1),
}


@each_row("digests, adapter, replicas, chosen", CHOICES.values(), CHOICES)
def test_a_replica_is_chosen_by(digests, adapter, replicas, chosen):
    found = choose(digests, None, adapter, replicas, key="k")
    assert found == chosen if chosen is not None else found < len(replicas) - 1


def test_there_must_be_replicas():
    """A name is there once: the number of a former replica of it would be chosen for ever."""
    with pytest.raises(ValueError, match="no replicas"):
        choose([], None, None, [])
    index = Replicas()
    index.add("r")
    with pytest.raises(ValueError, match="name is 'r'"):
        index.add("r")
    index.remove("r")
    assert index.add("r") == 0 and len(index) == 1


def test_the_index_chooses_as_the_plain_form():
    """While requests come and end, pages come and go, and replicas load adapters, drain, die and return."""
    draw, index, states = random.Random(0), Replicas(), dict[str, ReplicaState]()
    chosen = Counter()

    def change(name: str, **new) -> None:
        states[name] = dataclasses.replace(states[name], **new)

    for time in range(2000):
        event, name = draw.random(), f"r{draw.randrange(24)}"
        if name not in states:
            if event < 0.3 or not states:
                index.add(name)
                states[name] = ReplicaState(name)
        elif event < 0.02:
            index.remove(name)
            del states[name]
        elif event < 0.06:
            change(name, draining=not states[name].draining)
            index.set_draining(name, states[name].draining)
        elif event < 0.1:
            change(name, adapters=dict.fromkeys(draw.sample("xyz", draw.randrange(3)), b""))
            index.set_adapters(name, states[name].adapters)
        elif event < 0.3:
            gone = set(draw.sample(sorted(states[name].digests), len(states[name].digests) // 2))
            change(name, digests=states[name].digests - gone)
            index.forget(name, [*gone, -time])
        elif event < 0.6:
            change(name, queue=max(0, states[name].queue + draw.randrange(-4, 3)))
            index.set_queue(name, states[name].queue)
        digests = [draw.randrange(4) * 100 + page for page in range(draw.randrange(8))]
        session, adapter = draw.choice((None, None, "s1", "s2")), draw.choice((None, None, "x", "y"))
        options = {"key": str(time), "imbalance": draw.choice((0.0, 2.5, 8.0))}
        replicas = list(states.values())
        found = index.choose(digests, session, adapter, **options)
        expected = replicas[plain_choice(digests, session, adapter, replicas, **options)].name
        assert found == index.number(expected), time
        if event > 0.4:
            change(expected, digests=states[expected].digests | set(digests))
            index.learn(expected, digests)
        assert len(index) == len(states) and index.known(expected) == states[expected].digests
        chosen[expected] += 1
    assert len(chosen) == 24
    for name in list(states):
        index.remove(name)
    assert not index._holders and not index._adapters and not len(index)


def test_a_conversation_stays_while_replicas_come_and_go():
    sessions = [f"s{number}" for number in range(300)]
    many = [ReplicaState(f"r{number}", queue=number % 3) for number in range(5)]
    homes = {each: many[choose([], each, None, many)].name for each in sessions}
    assert min(Counter(homes.values()).values()) > 30
    random.Random(0).shuffle(many)
    assert {each: many[choose([], each, None, many)].name for each in sessions} == homes
    fewer = many[1:]
    moved = [each for each in sessions if fewer[choose([], each, None, fewer)].name != homes[each]]
    assert {homes[each] for each in moved} == {many[0].name}
    # Its replica may be much busier, but not at any price.
    for queue, stays in ((15, True), (17, False)):
        busy = [with_state(each, queue=queue if each.name == homes["s0"] else 0) for each in many]
        assert (busy[choose([], "s0", None, busy)].name == homes["s0"]) == stays


def test_a_replica_that_claims_every_page_gets_little_more():
    """At most `imbalance` requests more than another one, and the one that is being sent."""
    replicas, queues = Replicas(), dict.fromkeys("abcd", 0)
    numbers = {replicas.add(name): name for name in queues}
    replicas.learn("a", range(1000))
    rng = np.random.default_rng(0)
    for step in range(400):
        for name, queue in queues.items():
            replicas.set_queue(name, queue)
        chosen = numbers[replicas.choose(rng.integers(0, 1000, 4).tolist(), None, None, key=str(step), imbalance=8.0)]
        queues[chosen] += 1
        assert queues[chosen] <= min(queues.values()) + 9
        if step >= 40:
            queues[max(queues, key=lambda name: queues[name])] -= 1
    assert queues.pop("a") > max(queues.values())  # as it does where it has the pages


def test_equal_requests_meet_and_others_spread():
    idle = [ReplicaState(f"r{number}") for number in range(4)]
    assert len({choose([7, 8], None, None, idle, key=str(number)) for number in range(50)}) == 1
    assert len({choose([], None, "x", idle, key=str(number)) for number in range(50)}) == 1
    for spread in (
        [choose([number], None, None, idle) for number in range(400)],
        [choose([], None, None, idle, key=str(number)) for number in range(400)],
    ):
        assert min(Counter(spread).values()) > 60


def test_prefixes_are_found_where_they_are():
    """Forty prefixes, four replicas that hold ten of them each: the share of requests that finds its own, and the
    longest queue, by policy.
    """

    def run(policy) -> tuple[float, int]:
        draw = random.Random(1)
        caches = [OrderedDict[int, None]() for _ in range(4)]
        queues, hits, longest, number = [0] * 4, 0, 0, 4000
        for time in range(number):
            prefix = draw.randrange(40)
            index = policy(time, prefix, queues, caches)
            hits += prefix in caches[index]
            caches[index][prefix] = None
            caches[index].move_to_end(prefix)
            if len(caches[index]) > 10:
                caches[index].popitem(last=False)
            queues[index] += 1
            longest = max(longest, *queues)
            for done in range(4):
                queues[done] = max(0, queues[done] - (draw.random() < 0.24))
        return hits / number, longest

    index = index_of([ReplicaState(f"r{number}") for number in range(4)])

    def affinity(time, prefix, queues, caches):
        for number, queue in enumerate(queues):
            index.set_queue(f"r{number}", queue)
        chosen = index.choose([prefix], None, None, key=str(time))
        held = set(caches[chosen]) | {prefix}
        index.learn(f"r{chosen}", held)
        index.forget(f"r{chosen}", index.known(f"r{chosen}") - held)
        return chosen

    rate, longest = run(affinity)
    others = run(lambda time, *_: time % 4), run(lambda time, prefix, queues, _: queues.index(min(queues)))
    assert rate > 0.8 and all(other < 0.3 for other, _ in others), (rate, others)
    assert longest < 60


def test_digests_are_the_engines(make_llm):
    """Of prompts with and without a salt; and what is published fits into its bytes, the same pages everywhere."""
    llm = make_llm()
    llm.reset_prefix_cache()
    page_size = llm._core.config.block_size
    prompts = [list(range(3 + number, 3 + number + 4 * page_size + 1)) for number in range(6)]
    for prompt in prompts:
        llm.generate({"prompt_token_ids": prompt, "cache_salt": "s"}, use_tqdm=False)
    known = llm._core.utility("prefixes", 1 << 16)
    published = set(np.frombuffer(bytes.fromhex(known["digests"]), ">u8").tolist())
    assert (known["weights"], known["adapters"]) == ("", {})
    for prompt in prompts:
        digests = prompt_digests(prompt, page_size, cache_salt="s")
        assert len(digests) == 4 and digests[-1] in published
        assert published.isdisjoint(prompt_digests(prompt, page_size))
        assert prompt_digests(prompt, page_size, cache_salt="s", most=2) == digests[:2]
    fewer = np.frombuffer(bytes.fromhex(llm._core.utility("prefixes", 64)["digests"]), ">u8").tolist()
    assert 0 < len(fewer) <= 8 and fewer == sorted(fewer) and set(fewer) < published
    lowest = max(each & -each for each in fewer)
    mask = min(each & -each for each in fewer) - 1
    assert lowest and set(fewer) == {each for each in published if not each & mask}


def test_pages_of_several_replicas_are_published_once():
    """Data-parallel replicas have the same pages, and so have cache groups."""
    keys = [bytes(28) + number.to_bytes(4, "big") for number in range(1, 65)]
    pool = SimpleNamespace(digests=[*keys, *(key + b"1" for key in keys)])
    rank = SimpleNamespace(pool=pool, weights_digest=b"")
    scheduler, extensions = SimpleNamespace(ranks=[rank] * 2), SimpleNamespace(by_name={})
    engine: Any = SimpleNamespace(scheduler=scheduler, extensions=extensions)
    for size, count in ((512, 64), (504, 32)):
        assert len(known_prefixes(engine, size)["digests"]) == 16 * count


ROUTES = {"acme": [["v1", 0.9], ["v2", 0.1]], "one": [["v3", 5]]}


def test_routes_divide_requests_by_weight():
    config = ServerConfig(lora_routes=json.dumps(ROUTES))
    assert ServerConfig(lora_routes=ROUTES).lora_routes == config.lora_routes
    routes = LoraRoutes.of(config, ("base",))
    assert routes.names == ("acme", "one") and LoraRoutes.of(ServerConfig()).names == ()
    found = Counter(routes.pick("acme", route_key("", f"{number}")) for number in range(4000))
    assert 3500 < found["v1"] < 3700 and found["v1"] + found["v2"] == 4000
    assert routes.pick("one", "x") == "v3" and routes.pick("base", "x") == "base"
    for number in range(50):
        keys = [route_key(f"session-{number}", f"{request}") for request in range(3)]
        assert len({routes.pick("acme", key) for key in keys}) == 1
    assert route_key("not a session", "r") == route_key("", "r") != route_key("r", "r")


WRONG = (
    "{", "[]", "{}", '{"a": []}', '{"a": [["b"]]}', '{"a": [["b", 0]]}', '{"a": [["b", -1]]}', '{"a": [["b", "1"]]}',
    '{"a": [["", 1]]}', '{"": [["b", 1]]}', '{"a": [["b", 1e999]]}', '{"a": [["b", NaN]]}', '{"a": [["b", true]]}',
    '{"base": [["b", 1]]}', '{"a": [["b", 1]], "A": [["c", 1]]}', '{"a": [["b", 1e308], ["c", 1e308]]}', "[" * 100_000,
    '{"a": [["b", 1' + 400 * "0" + "]]}", {"a": [["b", 1j]]}, '{"a": [["b", 1]], "a": [["c", 1]]}',
    '[["a", [["b", 1]]]]', '{"a": {"b": 1}}',
)  # fmt: skip


@each_row("text", WRONG)
def test_wrong_routes_are_refused(text):
    with pytest.raises(ConfigError, match="lora_routes"):
        LoraRoutes.of(ServerConfig(lora_routes=text), ("base",))
