"""The messages of a step: one bucket and one set of flags for all ranks, each rank's own rows, global overflow."""

from __future__ import annotations

import numpy as np

from jaxengine.models.forward_batch import HEADER
from jaxengine.scheduler.base.sampling_fields import RANDOM
from jaxengine.scheduler.base.token_params import LOGPROBS, TokenParams
from jaxengine.scheduler.batches.batch import PageDeltas
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.batches.packing import delta_chunks
from tests.scheduler.loop import Loop, check_output, make


def headers(loop, message):
    layout = loop.packer.layouts[message.bucket]
    return [dict(zip(HEADER, layout.view(row, "header").tolist(), strict=True)) for row in message.buffer]


def test_an_empty_rank_is_padding_with_the_flags_of_the_others():
    loop = Loop(num_ranks=3)
    params = TokenParams(temperature=0.7, logprobs=2)
    loop.scheduler.add_request(make("a", range(5), 4))
    loop.scheduler.add_request(make("b", range(1, 3), 4, params=params))
    message = loop.packer.pack(loop.scheduler.schedule())
    layout = loop.packer.layouts[message.bucket]
    assert message.buffer.shape == (3, layout.size) and message.buffer.dtype == np.int32
    first, second, empty = headers(loop, message)
    assert [header["num_seqs"] for header in (first, second, empty)] == [1, 1, 0]
    assert first["features"] == second["features"] == empty["features"] == RANDOM | LOGPROBS
    slot, num_scheduled, _, sample, _ = layout.view(message.buffer[2], "rows")
    assert (slot == 8).all() and not num_scheduled.any() and not sample.any()
    assert (layout.view(message.buffer[2], "token_ids") == -1).all()
    assert (layout.view(message.buffer[2], "deltas")[0] == 8).all()


def test_a_step_without_rows_is_padding_and_can_be_changed():
    loop = Loop(num_ranks=2)
    for bucket in loop.packer.buckets:
        for features in (RANDOM, 0):
            message, layout = loop.packer.nothing(bucket, features), loop.packer.layouts[bucket]
            assert [layout.view(row, "header").tolist() for row in message] == [[0, 0, features]] * 2
            for row in message:
                slot, num_scheduled, _, sample, _ = layout.view(row, "rows")
                assert (slot == 8).all() and not num_scheduled.any() and not sample.any()
            message[:] = 7


def test_decodes_of_one_rank_beside_a_prefill_of_another():
    """As many tokens as rows at most, and yet no decode-only step."""
    loop = Loop(num_ranks=2, max_num_batched_tokens=8, sync=True)
    requests = [make(index, [index], 4 + 20 * (index % 2 == 0)) for index in range(16)]
    for request in requests:
        loop.scheduler.add_request(request)
    while len(loop.finished) < 8:
        loop.step()
    assert loop.device.shapes == {Bucket(8, 8)}
    assert [rank.slots.num_active for rank in loop.scheduler.ranks] == [8, 0]
    requests.append(make("prompt", [1, 2], 12))
    loop.scheduler.add_request(requests[-1])
    step = loop.step()
    assert [(batch.num_rows, batch.num_tokens) for batch in step.batches] == [(8, 8), (1, 2)]
    assert loop.device.shapes == {Bucket(8, 8), Bucket(9, 8)}
    loop.run()
    for request in requests:
        check_output(request)


def test_overflow_names_global_slots():
    loop = Loop(num_ranks=2, page_size=1, num_pages=128, max_num_batched_tokens=32, sync=True)
    prompt = list(range(30))
    for index in range(2):
        loop.scheduler.add_request(make(index, prompt, 1))
    loop.run()
    requests = [make(f"again {index}", [*prompt, 40 + index], 4) for index in range(2)]
    for request in requests:
        loop.scheduler.add_request(request)
    message = loop.packer.pack(loop.scheduler.schedule())
    assert [request.rank for request in requests] == [0, 1]
    assert set(message.overflow.rows.tolist()) == {0, 8}
    assert message.overflow.rows.dtype == np.int32
    table = np.full((2, 31), -1)
    layout = loop.packer.layouts[message.bucket]
    for slot, column, page in zip(*message.overflow, strict=True):
        table[slot // 8, column] = page
    for rank, row in enumerate(message.buffer):
        for slot, column, page in layout.view(row, "deltas").T:
            if slot < 8:
                table[rank, column] = page
    for rank in range(2):
        expected = loop.scheduler.ranks[rank].pages.table[0, 0, :31]
        assert (table[rank] == expected).all()


def test_entries_of_a_batch_without_rows_are_those_of_slots_without_an_owner():
    """A decode grows, and then loses its slot to a prompt that lacks pages even so, because copies hold some."""
    loop = Loop(num_ranks=2, num_pages=16, long_prefill_token_threshold=16, enable_prefix_caching=False, sync=True)
    prompt, decode, other = make("prompt", range(40), 1), make("decode", range(4), 4), make("other", range(44), 1)
    for request in (prompt, other, decode):
        loop.scheduler.add_request(request)
    loop.step()
    assert (prompt.rank, other.rank, decode.rank) == (0, 1, 0)
    loop.pool.allocate(loop.pool.num_free - 1)
    step = loop.scheduler.schedule()
    empty, full = step.batches
    assert empty.num_rows == 0 and len(empty.deltas.rows) == 1 and full.num_rows == 1
    assert not loop.scheduler.ranks[0].slots.active.any()
    message = loop.packer.pack(step)
    layout = loop.packer.layouts[message.bucket]
    assert (layout.view(message.buffer[0], "deltas")[0] == loop.packer.num_table_rows).all()
    assert not len(message.overflow.rows)


def test_messages_outside_a_step_are_padded_with_no_ranks_slot():
    loop = Loop(num_ranks=3)
    assert loop.packer.num_slots == 24
    deltas = PageDeltas(*(np.arange(5, dtype=np.int32) for _ in range(3)))
    chunks = list(delta_chunks(deltas, 4, loop.packer.num_slots))
    assert chunks[1].tolist() == [[4, 24, 24, 24], [4, 0, 0, 0], [4, 0, 0, 0]]
