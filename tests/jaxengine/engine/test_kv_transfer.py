"""Pages handed over between engines: tokens are those of one engine, whatever comes or does not come."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM
from jaxengine.engine.extensions.offload.page_stores import OffloadStats, PageStores, Tiers
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tiers.host import HostTier
from tests.conftest import TINY_CHECKPOINT
from tests.jaxengine.engine.kv_transfer_cases import DECODE, Producer, asking, connector, prefill
from tests.jaxengine.engine.offload_cases import Poisoned, prompts_of
from tests.jaxengine.engine.test_draft_models import accepted_share
from tests.jaxengine.engine.test_offload import KINDS, SMALL, head_load, head_options, options_of, plainly
from tests.jaxengine.engine.test_speculation import force
from tests.tables import each_row

POOL = {name: value for name, value in SMALL.items() if name != "kv_offloading_size"}
NUM_CACHED = 36  # of a prompt of 37 tokens, in pages of 4


def extension(llm: LLM) -> Any:
    return llm.core.engine.extensions.by_name["kv_transfer"]


def decode(llm: LLM, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    """Outputs of prompts whose pages are elsewhere; the engine's own have been forgotten."""
    llm.reset_prefix_cache()
    asked = [asking(index, 9, each) for index, each in enumerate(params)]
    return llm.generate([{"prompt_token_ids": each} for each in prompts], asked, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.fixture(scope="module")
def plain_tokens(make_llm) -> list[list[int]]:
    return plainly(make_llm, prompts_of(3))


@pytest.fixture(scope="module")
def both(tiny_options, tmp_path_factory):
    """An engine that hands over pages to itself, by TCP."""
    options = tiny_options | POOL | connector("kv_both", "tcp", tmp_path_factory.mktemp("tcp"))
    with LLM(**options) as llm:
        Poisoned(llm)
        yield llm


def leases_end(llm: LLM) -> bool:
    """Whether the leases end, and pages of none are kept."""
    end, transfer = time.monotonic() + 60, extension(llm)
    while transfer.leases and time.monotonic() < end:
        transfer.rest()
        time.sleep(0.005)
    host = llm.core.engine.scheduler.extension("offload").store.host
    return not (transfer.leases or len(transfer._keys_kept) or transfer.transport._pages or host._pins)


def end_leases(llm: LLM) -> None:
    for each in list(extension(llm).leases):
        extension(llm)._end_lease(each)
    assert leases_end(llm)


def test_tokens_are_those_of_one_engine(both, plain_tokens):
    params = [prefill(both, each, index) for index, each in enumerate(prompts_of(3))]
    assert params[0]["do_remote_prefill"] and not params[0]["do_remote_decode"]
    assert params[0]["remote_block_ids"] == (tuple(range(9)),) and params[0]["remote_port"] > 0
    assert len(extension(both).leases) == 3
    outputs = decode(both, prompts_of(3), params)
    assert tokens(outputs) == plain_tokens
    assert [each.num_cached_tokens for each in outputs] == [NUM_CACHED] * 3
    assert both.core.runner.compiles.count == 0
    assert leases_end(both)  # readers have said that they have everything
    for rank in both.core.engine.scheduler.ranks:
        rank.pool.check()


def test_what_does_not_come_is_computed(both, plain_tokens):
    prompts, transfer = prompts_of(3), extension(both)

    def after(change) -> list[int]:
        params = [prefill(both, each) for each in prompts]
        change(params)
        outputs = decode(both, prompts, params)
        assert tokens(outputs) == plain_tokens
        end_leases(both)
        return [each.num_cached_tokens for each in outputs]

    def cut(params) -> None:
        both.core.engine.extensions.by_name["offload"].flush()
        pages = transfer.transport._pages
        for at, each in enumerate(list(pages)):
            pages[each] = pages[each][: -1 if at % 9 == 4 else None]

    assert after(cut) == [16] * 3
    assert after(lambda params: [each.update(remote_block_ids=((0, 1, 7, 100),)) for each in params]) == [8] * 3
    lies = {"remote_engine_id": "another", "remote_block_ids": ((), (0,)), "tp_size": 4}
    assert after(lambda params: [each.update(lies) for each in params]) == [0] * 3
    resting = transfer.transport._resting = {("10.0.0.1", 1): 0.0}
    assert after(lambda params: [each.update(remote_port=1) for each in params]) == [0] * 3
    assert [*transfer.transport._resting] == [("127.0.0.1", 1)] and len(resting) == 1
    short = dataclasses.replace(transfer._options, kv_lease_duration=0.01)
    old, transfer._options = transfer._options, short
    assert after(lambda params: leases_end(both)) == [0] * 3  # a lease that has ended
    transfer._options = dataclasses.replace(old, kv_load_failure_policy="fail")
    outputs = decode(both, prompts, [prefill(both, each) | {"remote_port": 1} for each in prompts])
    assert {(each.outputs[0].finish_reason, "did not come" in each.outputs[0].stop_reason) for each in outputs} == {
        ("error", True)
    }
    assert tokens(decode(both, prompts, [prefill(both, each) for each in prompts])) == plain_tokens
    transfer._options = old
    end_leases(both)


def test_no_local_load_waits_for_an_engine_that_does_not_answer(both, plain_tokens):
    """Pages of more requests than there are slots are to come from an address that takes connections and says
    nothing. Meanwhile requests get their pages from host memory, and those that wait have theirs computed in the end.
    """
    prompts, transfer, core = prompts_of(3), extension(both), both.core
    both.reset_prefix_cache()
    for each in prompts_of(8):  # the last push those of the first out of the pool
        both.generate([{"prompt_token_ids": each}], asking(0, 1, {}), use_tqdm=False)
    core.engine.extensions.by_name["offload"].flush()
    strangers = [each[::-1] for each in prompts_of(9)]
    old, transfer.transport.patience = transfer.transport.patience, 1.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = {"remote_port": silent.getsockname()[1], "remote_block_ids": [[*range(9)]]}
        gone = asking(0, 9, PREFILL | source)
        core.add(core.inputs.prepare({"prompt_token_ids": strangers[0]}, gone, request_id="gone"))
        core.step()
        (load,) = transfer._offload._loads._loading
        core.abort("gone")  # and what was to be read for it, although nothing has failed
        load.future.result(30)
        assert load.num_parts == 0 and silent.getsockname() not in transfer.transport._resting
        for index, each in enumerate(strangers):
            far = asking(index, 9, PREFILL | source)
            core.add(core.inputs.prepare({"prompt_token_ids": each}, far, request_id=f"far {index}"))
        finished = dict[str, Any]()
        for index, each in enumerate(prompts):
            core.add(core.inputs.prepare({"prompt_token_ids": each}, asking(index, 9, {}), request_id=str(index)))
        while core.has_unfinished:
            finished |= {each.request_id: each for each in core.step() if each.finished}
    transfer.transport.patience = old
    transfer.transport._resting = {}
    assert sorted(list(finished)[:3]) == ["0", "1", "2"]
    assert tokens(local := [finished[str(index)] for index in range(3)]) == plain_tokens
    assert {each.num_cached_tokens for each in local} == {NUM_CACHED}
    assert [finished[f"far {index}"].num_cached_tokens for index in range(9)] == [0] * 9
    end_leases(both)


def test_leases_are_bounded(both):
    transfer = extension(both)
    host = both.core.engine.scheduler.extension("offload").store.host
    capacity, host.capacity = host.capacity, 20 * transfer._offload.mover.page_bytes
    found = [prefill(both, each) is not None for each in prompts_of(3)]
    host.capacity = capacity
    assert found == [True, True, False] and transfer.stats.num_refused == 1
    end_leases(both)


def test_by_a_folder(tiny_options, tmp_path, plain_tokens):
    with LLM(**tiny_options | POOL | connector("kv_both", "folder", tmp_path)) as llm:
        Poisoned(llm)
        params = [prefill(llm, each) for each in prompts_of(3)]
        assert params[0]["remote_host"] is None
        outputs = decode(llm, prompts_of(3), params)
        assert tokens(outputs) == plain_tokens and {each.num_cached_tokens for each in outputs} == {NUM_CACHED}
        for path in (tmp_path / "pages").rglob("*"):  # forged
            if path.is_file():
                path.write_bytes(path.read_bytes()[:-1] + b"x")
        extension(llm).transport.open = lambda source: reader(llm)
        outputs = decode(llm, prompts_of(3), params)
        assert tokens(outputs) == plain_tokens and {each.num_cached_tokens for each in outputs} == {0}


def reader(llm: LLM) -> Any:
    """Reader that waits for nothing."""
    found = type(extension(llm).transport).open(extension(llm).transport, None)
    found._deadline = 0.0
    return found


PREFILL = DECODE | {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "other",
    "remote_request_id": "1",
    "remote_block_ids": [[0]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


@each_row(
    "changes, message",
    (
        ({"remote_host": "ipc:///tmp/x"}, "kv_transfer_params.remote_host is 'ipc"),
        ({"remote_host": "0.0.0.0"}, "kv_transfer_params.remote_host is '0.0.0.0'"),
        ({"remote_host": "[::1"}, "kv_transfer_params.remote_host is '[::1'"),
        ({"remote_host": "h" * 300}, "kv_transfer_params.remote_host is"),
        ({"remote_host": None}, "remote_port is 5600"),
        ({"remote_host": None, "remote_port": None}, "transport is tcp"),
        ({"remote_port": 0}, "kv_transfer_params.remote_port is 0"),
        ({"remote_block_ids": [1, 2]}, "kv_transfer_params.remote_block_ids is"),
        ({"remote_block_ids": [[-1]]}, "kv_transfer_params.remote_block_ids is"),
        ({"remote_block_ids": [[1.0]]}, "kv_transfer_params.remote_block_ids is"),
        ({"remote_block_ids": [[1 << 40]]}, "kv_transfer_params.remote_block_ids is"),
        ({"remote_block_ids": [[0], [0, 0]]}, "kv_transfer_params.remote_block_ids is"),
        ({"remote_block_ids": None}, "kv_transfer_params.remote_block_ids is None"),
        ({"remote_request_id": "x" * 300}, "kv_transfer_params.remote_request_id is"),
        ({"do_remote_decode": True}, "kv_transfer_params.do_remote_decode is True"),
        ({"do_remote_prefill": 1}, "kv_transfer_params.do_remote_prefill is 1"),
        ({"remote_bootstrap_addr": "x"}, "has 'remote_bootstrap_addr'"),
    ),
)
def test_refused_fields(changes, message, both):
    with pytest.raises(RequestError) as raised:
        both.generate([{"prompt_token_ids": [1, 2]}], asking(0, 1, PREFILL | changes), use_tqdm=False)
    assert message in str(raised.value)


def test_refused_engines(make_llm, both):
    for llm, role, params, message in (
        (make_llm(), None, DECODE, "without a NixlConnector"),
        (both, "kv_producer", PREFILL, "kv_role is kv_producer"),
        (both, "kv_consumer", DECODE, "kv_role is kv_consumer"),
    ):
        if role is not None:
            old = extension(llm)._options
            extension(llm)._options = dataclasses.replace(old, kv_role=role)
        with pytest.raises(RequestError, match=message):
            llm.generate([{"prompt_token_ids": [1, 2]}], asking(0, 1, params), use_tqdm=False)
        if role is not None:
            extension(llm)._options = old
    params = asking(0, 1, DECODE)
    params.temperature, params.n = 1.0, 2
    with pytest.raises(RequestError, match="n is 2"):
        both.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)


@pytest.mark.thorough("another kind of page")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_page(executables_dir, tmp_path, kind):
    model, more = KINDS[kind]
    options = options_of(model, executables_dir, **more) | {"kv_offloading_size": None}
    with LLM(**options | connector("kv_both", "tcp", tmp_path)) as llm:
        Poisoned(llm)
        plain = tokens(
            llm.generate([{"prompt_token_ids": each} for each in prompts_of(3)], [asking(i, 9, {}) for i in range(3)])
        )
        llm.reset_prefix_cache()
        params = [prefill(llm, each, index) for index, each in enumerate(prompts_of(3))]
        outputs = decode(llm, prompts_of(3), params)
        assert tokens(outputs) == plain and {each.num_cached_tokens for each in outputs} == {NUM_CACHED}
        assert llm.core.runner.compiles.count == 0


def test_a_draft_model_gets_its_pages(tiny_options, tmp_path, plain_tokens):
    """One that is the model itself is always right, unless it reads what has not come."""
    chosen = {"method": "draft_model", "model": str(TINY_CHECKPOINT), "num_speculative_tokens": 2}
    prompts, drafting = prompts_of(3), {"speculative_config": chosen}
    with LLM(**tiny_options | POOL | drafting | connector("kv_both", "tcp", tmp_path)) as llm:
        Poisoned(llm)
        force(llm, 3)
        params = [prefill(llm, each, index) for index, each in enumerate(prompts)]
        outputs = decode(llm, prompts, params)
        assert tokens(outputs) == plain_tokens
        assert {each.num_cached_tokens for each in outputs} == {NUM_CACHED} and llm.core.runner.compiles.count == 0
        drafts: Any = llm.core.engine.extensions.by_name["drafts"]
        assert drafts.stats.num_tokens == drafts.stats.accepted.sum() > 12


@pytest.mark.thorough("another way to draft")
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_gets_its_pages(executables_dir, tmp_path, method):
    """It is right by its keys and values alone."""
    prompts, params = head_load()
    options = head_options(method, tmp_path, executables_dir) | connector("kv_both", "tcp", tmp_path)
    # Room for all, or pages that came are pushed out before their request runs.
    with LLM(**options | {"num_gpu_blocks_override": 240}) as llm:
        Poisoned(llm)
        force(llm, 1)
        expected = llm.generate(prompts, params, use_tqdm=False)  # without drafts
        force(llm, 2)
        for own, prompt in zip(params, prompts, strict=True):
            own.extra_args = {"kv_transfer_params": prefill(llm, prompt["prompt_token_ids"])}
        llm.reset_prefix_cache()
        orders = llm.core.engine.scheduler.extension("offload")
        before = orders.num_hits
        assert accepted_share(llm, prompts, params, expected) > 0.95
        assert extension(llm).stats.num_received > 100 and orders.num_hits - before == 12 * 40
        assert llm.core.runner.compiles.count == 0


@pytest.mark.thorough("a process of its own")
@pytest.mark.parametrize("transport", ["tcp", "jax", "folder", "shared memory"])
def test_two_processes(request, tiny_options, tmp_path, plain_tokens, transport):
    options, folder = tiny_options | POOL, tmp_path
    if transport == "shared memory":
        folder, transport = Path(tempfile.mkdtemp(dir="/dev/shm")), "folder"
        request.addfinalizer(lambda: shutil.rmtree(folder))
    producer = Producer(options | connector("kv_producer", transport, folder))
    try:
        with LLM(**options | connector("kv_consumer", transport, folder)) as llm:
            Poisoned(llm)
            params = [producer.prefill(each) for each in prompts_of(3)]
            outputs = decode(llm, prompts_of(3), params)
            assert tokens(outputs) == plain_tokens and {each.num_cached_tokens for each in outputs} == {NUM_CACHED}
            params = [producer.prefill(each) for each in prompts_of(3)]
            producer.kill()
            outputs = decode(llm, prompts_of(3), params)
            assert tokens(outputs) == plain_tokens and llm.core.runner.compiles.count == 0
            # What was written is still there.
            assert {each.num_cached_tokens for each in outputs} == ({NUM_CACHED} if transport == "folder" else {0})
    finally:
        producer.kill()


def test_what_is_forgotten_on_its_way_still_goes_to_who_waits_for_it():
    """A prefix cache may be reset between the dispatch of a copy and its offer to another engine."""
    blocks = {b"a": np.zeros(4, np.uint8), b"b": np.ones(4, np.uint8)}
    leaving = SimpleNamespace(entries=[(b"a", 0), (b"b", 1)], blocks=lambda: dict(blocks))
    mover: Any = SimpleNamespace(save=lambda ranks: [leaving])
    tiers = Tiers(HostTier(1 << 10), None)
    stores = PageStores(mover, tiers, OffloadStats(), threading.Event(), is_bounded=False)
    stores.send([[(b"a", 0), (b"b", 1)]], states=False)
    copy = tiers.arriving[b"a"]
    copy.result()
    del tiers.arriving[b"a"]
    stores.keep()
    assert b"b" in tiers.host and b"a" not in tiers.host and copy.result().keys() == blocks.keys()
    stores.shutdown()
