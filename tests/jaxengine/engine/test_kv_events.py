"""Events of pages: vLLM's structs decode them, and who follows them knows what the pool has."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from jaxengine import LLM, SamplingParams
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.kv.kv_events import KVEventsConfig, address_of_replica
from jaxengine.engine.extensions import build, kv_events
from tests.conftest import TINY_OPTIONS
from tests.tables import each_row


# The structs of vLLM 0.33.0: field names, defaults and options, since its events are maps.
class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Follower:
    """Index of pages, by what an engine publishes: (parent, tokens) of each page by its hash and group."""

    def __init__(self, events: str, replay: str):
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(events)
        self.events.subscribe(b"kv@")
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay)
        self.pages: dict[tuple[Any, int], tuple[Any, list[int]]] = {}
        self.stored: list[BlockStored] = []
        self.number = 0

    def catch_up(self) -> list[Any]:
        """Apply what was published since the last call; return the events."""
        self.replay.send_multipart([b"", self.number.to_bytes(8, "big")])
        found = []
        while True:
            _, number, payload = self.replay.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                break
            assert int.from_bytes(number, "big") == self.number
            self.number += 1
            batch = decode(payload)
            assert batch.ts > 1.7e9 and batch.data_parallel_rank == 0
            found += batch.events
        for event in found:
            self.apply(event)
        return found

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.pages.clear()
        elif isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                del self.pages[each, event.group_idx]
        else:
            self.stored.append(event)
            parent, size = event.parent_block_hash, event.block_size
            assert len(event.token_ids) == size * len(event.block_hashes) == size * len(event.extra_keys or ())
            for at, each in enumerate(event.block_hashes):
                self.pages[each, event.group_idx] = parent, event.token_ids[at * size : (at + 1) * size]
                parent = each

    def knows(self, token_ids: list[int], group: int = 0) -> int:
        """How many leading pages of a sequence are known, as a router finds them."""
        count, parent = 0, None
        by_parent = {
            (where, tuple(tokens)): page for (page, own), (where, tokens) in self.pages.items() if own == group
        }
        while (page := by_parent.get((parent, tuple(token_ids[4 * count : 4 * count + 4])))) is not None:
            count, parent = count + 1, page
        return count

    def close(self) -> None:
        self.context.destroy(0)


def test_a_replay_is_whole_for_a_router_that_is_slow_and_does_not_wait_for_one_that_never_reads(tmp_path):
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    options = {"endpoint": addresses[0], "replay_endpoint": addresses[1], "buffer_steps": 4000}
    publisher = kv_events.Publisher(KVEventsConfig(enable_kv_cache_events=True, **options), 0)
    for _ in range(5000):
        publisher.publish([kv_events.AllBlocksCleared()])
    dead, slow = Follower(*addresses), Follower(*addresses)
    for _ in range(3):
        dead.replay.send_multipart([b"", bytes(8)])
    slow.number = 1000
    slow.replay.send_multipart([b"", slow.number.to_bytes(8, "big")])
    time.sleep(0.2)
    assert len(slow.catch_up()) == 4000 and slow.number == 5000
    for each in (dead, slow):
        each.close()
    publisher.shutdown()


def test_an_address_that_cannot_be_used_leaves_none_open(tmp_path):
    options: Any = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    config = KVEventsConfig(enable_kv_cache_events=True, **options)
    (tmp_path / "replay_dp1").mkdir()  # where the second replica's socket would be
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="replay_endpoint .*replay_dp1 cannot be used"):
        kv_events.KVEvents(config, 2)
    assert "kv-events" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_an_extension_that_cannot_be_made_or_begin_shuts_down_those_before_it(monkeypatch):
    def fail(_: Any) -> Any:
        raise ConfigError("kv_events_config", {}, "another address")

    ended: list[str] = []
    made: Any = SimpleNamespace(shutdown=lambda: ended.append("offload"), is_idle=False, epilogue=None)
    made.attach = lambda loop: None
    monkeypatch.setattr(build.Hooks, "update", lambda hooks, active: None)
    monkeypatch.setattr(build, "_MAKERS", {"offload": lambda _: made, "sessions": lambda _: made, "kv_events": fail})
    options = {"sleep_idle_seconds": None, "publishes_kv_events": True}
    absent = (
        "speculative_config",
        "enable_lora",
        "kv_cache_metrics",
        "hands_over_kv",
        "record_trace",
        "enable_mfu_metrics",
    )
    runner: Any = SimpleNamespace(config=SimpleNamespace(**options, **dict.fromkeys(absent)), extensions={"offload": 0})
    with pytest.raises(ConfigError, match="another address"):
        build.Extensions(runner)
    assert ended == ["offload"] * 2
    recording: Any = SimpleNamespace(attach=fail, shutdown=lambda: ended.append("trace"), is_idle=False, epilogue=None)
    build._MAKERS.update(kv_events=lambda _: recording)  # one whose file is opened last, on a full disk
    extensions = build.Extensions(runner)
    with pytest.raises(ConfigError, match="another address"):
        extensions.attach(runner)
    assert ended[2:] == ["offload", "offload", "trace"]
    # One that a request needs: the next such request makes it again, since the failed one takes part in nothing.
    extensions.active.remove(extensions.by_name.pop("kv_events"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="another address"):
            extensions.require("kv_events")
        assert ended[-1] == "trace" and "kv_events" not in extensions.by_name and recording not in extensions.active
    recording.shutdown = partial(divmod, 1, 0)
    with pytest.raises(ConfigError, match="another address"):
        extensions.require("kv_events")


def test_all_extensions_are_shut_down_and_the_first_error_is_raised():
    ended: list[str] = []

    def shutdown(name: str, fails: bool) -> None:
        ended.append(name)
        if fails:
            raise OSError(name)

    extensions = build.Extensions.__new__(build.Extensions)
    fails = {"sessions": False, "offload": True, "kv_transfer": True, "recording": False}
    made: Any = {name: SimpleNamespace(shutdown=partial(shutdown, name, each)) for name, each in fails.items()}
    extensions.by_name = made
    with pytest.raises(OSError, match="offload"):
        extensions.shutdown()
    assert ended == list(fails)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv")
    return f"ipc://{folder}/events", f"ipc://{folder}/replay"


@pytest.fixture(scope="module")
def llm(tiny_options, addresses):
    config = {"enable_kv_cache_events": True, "endpoint": addresses[0], "replay_endpoint": addresses[1]}
    ages = {"kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0}
    with LLM(**tiny_options | {"kv_events_config": config | {"topic": "kv@pod@tiny"}} | ages) as llm:
        yield llm


def test_who_follows_the_events_knows_the_pool(llm, addresses):
    follower = Follower(*addresses)
    pool = llm.core.engine.scheduler.ranks[0].pool
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 128, int(length)).tolist() for length in rng.integers(1, 60, 30)]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    for first in range(0, 30, 10):
        asked = [{"prompt_token_ids": each} for each in prompts[first : first + 10]]
        outputs = llm.generate(asked, params, use_tqdm=False)
        follower.catch_up()
        assert {page for page, _ in follower.pages} == {int.from_bytes(each[-8:], "big") for each in pool._page_of}
        for output in outputs[-3:]:
            whole = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            assert follower.knows(whole) == (len(whole) - 1) // 4  # the last token has no keys
    assert all(
        (each.medium, each.lora_name, each.kv_cache_spec_kind) == ("GPU", None, "full_attention")
        for each in follower.stored
    )
    assert follower.number > 3 and len(follower.stored) > 30
    llm.generate([{"prompt_token_ids": prompts[0], "cache_salt": "mine"}], params, use_tqdm=False)
    follower.catch_up()
    assert any(each.extra_keys and each.extra_keys[0] == ("mine",) for each in follower.stored)
    llm.reset_prefix_cache()
    llm.core.rest()
    assert isinstance(follower.catch_up()[-1], AllBlocksCleared) and not follower.pages
    # What is published has the same form.
    llm.generate([{"prompt_token_ids": prompts[-1]}], params, use_tqdm=False)
    assert follower.events.poll(5000)
    topic, number, payload = follower.events.recv_multipart()
    assert topic == b"kv@pod@tiny" and len(number) == 8 and decode(payload).events
    follower.close()


def ages_of(llm) -> dict[str, Any]:
    found = {each.name: each for each in llm.get_metrics()}
    return {name: found[f"vllm:kv_block_{name}_seconds"] for name in ("lifetime", "idle_before_evict", "reuse_gap")}


def test_pages_that_make_room_are_removed(llm, addresses):
    follower = Follower(*addresses)
    follower.catch_up()
    pool, params = llm.core.engine.scheduler.ranks[0].pool, SamplingParams(max_tokens=1)
    before = ages_of(llm)
    seen, repeated = [], {"prompt_token_ids": list(range(100, 109))}
    for _ in range(3):
        llm.generate([repeated], params, use_tqdm=False)
    for index in range(2 * pool.num_pages // 20):
        llm.generate([{"prompt_token_ids": [(index * 7 + at) % 128 for at in range(80)]}], params, use_tqdm=False)
        seen += follower.catch_up()
    removed = sum(len(each.block_hashes) for each in seen if isinstance(each, BlockRemoved))
    after = ages_of(llm)
    counts = {name: each.count - before[name].count for name, each in after.items()}
    # Two requests after the first have found the same two pages.
    assert counts == {"lifetime": removed, "idle_before_evict": removed, "reuse_gap": 2} and removed
    assert after["lifetime"].sum > after["idle_before_evict"].sum > 0
    assert {page for page, _ in follower.pages} == {int.from_bytes(each[-8:], "big") for each in pool._page_of}
    follower.close()


@each_row(
    "config, message",
    (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([1], "kv_events_config is"),
        ({"publisher": "nats"}, "null, zmq"),
        ({"endpoint": "http://x"}, "kv_events_config.endpoint is 'http://x'"),
        ({"endpoint": "tcp://*:0"}, "kv_events_config.endpoint is"),
        ({"replay_endpoint": "inproc://x"}, "kv_events_config.replay_endpoint is"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"hwm": True}, "hwm is True"),
        ({"topic": "x" * 2000}, "at most 1024"),
        ({"max_queue_size": 7}, "has max_queue_size"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events is 1"),
    ),
)
def test_refused_options(config, message):
    with pytest.raises(ConfigError) as raised:
        EngineConfig.from_options(kv_events_config=config)
    assert message in str(raised.value)


def test_options_that_publish_nothing():
    for config in (None, {}, {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert not EngineConfig.from_options(kv_events_config=config).publishes_kv_events
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        config = {"enable_kv_cache_events": True}
        LLM(**TINY_OPTIONS, kv_events_config=config, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_cache_metrics is given, but enable_prefix_caching is off"):
        LLM(**TINY_OPTIONS, kv_cache_metrics=True, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"kv_cache_metrics_sample is 0\.5, but kv_cache_metrics is off"):
        LLM(**TINY_OPTIONS, kv_cache_metrics_sample=0.5)
    for sample in (0, 1.5, -1, float("nan")):
        with pytest.raises(ConfigError, match="kv_cache_metrics_sample"):
            EngineConfig.from_options(kv_cache_metrics_sample=sample)


def test_replicas_have_addresses_of_their_own():
    found = [address_of_replica(each, rank) for each in ("tcp://[::1]:5557", "ipc:///run/kv") for rank in (0, 2)]
    assert found == ["tcp://[::1]:5557", "tcp://[::1]:5559", "ipc:///run/kv", "ipc:///run/kv_dp2"]
