"""Steps whose decodes have drafts, against a device that keeps what it was fed in pages: outputs are as without."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.scheduler.base.request import FinishReason, RequestStatus
from jaxengine.scheduler.base.token_params import MASK, Grammar, TokenParams
from jaxengine.scheduler.extensions.draft_width import MOST_RETRY_STEPS, RETRY_STEPS, TRIALS, DraftWidth
from jaxengine.scheduler.extensions.drafts import DraftSection
from tests.scheduler.fake_device import VOCAB_SIZE, expected_output, guess, next_token
from tests.scheduler.loop import Loop, check_output, make, random_request

WIDTHS = (2, 4, 8)
GUESSES = np.full(5, -1)


def run_all(loop, rng, count, *, aborts=False, **fields):
    shared = rng.integers(0, VOCAB_SIZE, 40).astype(np.int32)
    requests = [random_request(rng, index, shared=shared, **fields) for index in range(count)]
    for request in requests:
        loop.scheduler.add_request(request)
        if aborts and rng.random() < 0.2:
            victim = requests[int(rng.integers(len(requests)))]
            if victim.status is not RequestStatus.FINISHED and victim.arrival_index >= 0:
                loop.scheduler.finish(victim, FinishReason.ABORT)
        for _ in range(int(rng.integers(0, 3))):
            loop.step()
    loop.run()
    assert 0 < loop.device.num_accepted < loop.device.num_drafts
    return requests


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_tokens", [800, 72])
def test_outputs_are_as_without_drafts(sync, page_size, num_tokens):
    limits = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 20}
    loop = Loop(sync=sync, num_pages=num_tokens // page_size, page_size=page_size, widths=WIDTHS, **limits)
    for request in run_all(loop, np.random.default_rng(num_tokens), 40):
        check_output(request)
    assert loop.pool.num_free == loop.config.num_pages
    assert loop.scheduler.num_prefix_hits > 0
    assert (loop.scheduler.num_preemptions > 0) == (num_tokens == 72)
    assert {bucket.width for bucket in loop.device.shapes} == {1, *WIDTHS}


@pytest.mark.parametrize("windows", [(6, None), (6, 9), (5,)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_windows_keep_what_wrong_drafts_could_need(windows, page_size):
    """Pages that nobody holds are poisoned before each step."""
    loop = Loop(num_pages=400 // page_size, page_size=page_size, windows=windows, widths=WIDTHS)
    window = None if None in windows else max(windows)
    for request in run_all(loop, np.random.default_rng(1), 30):
        check_output(request, window)
    assert loop.pool.num_free == loop.config.num_pages


def test_ranks_go_on_by_counts_of_their_own():
    loop = Loop(num_ranks=2, num_pages=24, widths=WIDTHS, policy="fair")
    for request in run_all(loop, np.random.default_rng(2), 40):
        check_output(request)


def test_stages_get_drafts_from_the_host():
    rng = np.random.default_rng(7)

    def draft(known, count):
        drafts = []
        for _ in range(min(count, int(rng.integers(0, 9)))):
            drafts.append(guess(rng, np.append(known, np.array(drafts, np.int32)).astype(np.int32)))
        return np.array(drafts, np.int32)

    loop = Loop(num_micro_batches=2, num_pages=24, widths=WIDTHS, draft=draft)
    for request in run_all(loop, np.random.default_rng(3), 40):
        check_output(request)


@pytest.mark.parametrize("changes", [{}, {"num_ranks": 2, "num_micro_batches": 2}, {"guided": True}], ids=str)
def test_what_must_come_costs_no_guess(changes):
    """Beside requests with guesses: those with a grammar have the tokens that the host knows, and no others but guesses
    where they may."""
    rng, given = np.random.default_rng(8), []

    def forced(request, num_output, most):
        slots = loop.scheduler.ranks[request.rank].slots
        may_be_less = slots.num_tokens[request.slot] - slots.num_known[request.slot] > 1  # behind guesses in flight
        if rng.random() < 0.3 or (may_be_less and "guided" in changes):
            return None
        tokens = expected_output(request.prompt_token_ids, num_output + most)[num_output:]
        assert 0 <= most < 8 and len(tokens) == most
        given.append(tokens[: int(rng.integers(0, most + 1))])
        return given[-1]

    draft = (lambda known, count: np.empty(0, np.int32)) if "num_micro_batches" in changes else None
    loop = Loop(num_pages=20, widths=WIDTHS, forced=forced, draft=draft, **changes)
    params = TokenParams(temperature=0, grammar=Grammar(kind="regex", text=".*"))
    requests = [random_request(rng, index, **({"params": params} if index % 3 else {})) for index in range(24)]
    for request in requests:
        loop.scheduler.add_request(request)
    num_both, num_guided, results, execute = 0, 0, [], loop.device.execute
    loop.device.execute = lambda packed: results.append(execute(packed)) or results[-1]
    while loop.scheduler.num_unfinished or loop.in_flight:
        step = loop.step()
        for rank, batch in enumerate(step.batches):
            counts, rows = batch.num_scheduled, batch.num_rows if step.width > 1 else 0
            section = batch.sections.get("drafts", DraftSection(np.empty(0, np.bool_), np.empty(0, np.bool_)))
            is_forced, is_guided = section
            assert len(is_forced) == len(is_guided) == rows
            masked = rank_features(loop, rank, batch)[:rows] & MASK > 0
            assert (is_guided == masked & ~is_forced & (counts[:rows] > 1)).all()
            num_guided += int(is_guided.sum())
            for row in np.flatnonzero(is_forced):
                first = int(counts[:row].sum()) + 1
                own = batch.decode_token_ids[first : first + counts[row] - 1] if counts[row] > 1 else ()
                assert batch.features & MASK and (np.array(own) >= 0).all()
                assert results[-1][1][rank][row] == counts[row]  # what must come is what comes there
            if len(is_forced):
                num_both += (counts[is_forced] > 1).any() and (counts[~is_forced] > 1).any()
    for request in requests:
        check_output(request)
    assert max(map(len, given)) == 7 and loop.scheduler.num_preemptions > 0
    assert (num_guided > 20) == ("guided" in changes)
    assert num_both > 0 or "num_micro_batches" in changes  # whose draft gives none


def rank_features(loop, rank, batch):
    return loop.scheduler.ranks[rank].slots.features[batch.slots]


def test_a_rank_without_decodes_joins_in():
    draft = lambda known, count: np.full(count, next_token(known), np.int32)  # noqa: E731
    loop = Loop(num_ranks=2, num_micro_batches=2, widths=(4,), draft=draft)
    loop.scheduler.extension("drafts").width.choose = lambda num_rows, runs: 4
    request = make("a", [1, 2, 3], 12)
    loop.scheduler.add_request(request)
    loop.run()
    check_output(request)
    assert loop.device.num_accepted > 0


def test_aborts_leave_no_page():
    loop = Loop(num_pages=20, widths=WIDTHS)
    for request in run_all(loop, np.random.default_rng(4), 100, aborts=True):
        if request.finish_reason is not FinishReason.ABORT:
            check_output(request)
    assert loop.pool.num_free == 20


def test_a_run_of_accepted_tokens_is_cut_where_the_request_ends():
    """All drafts are right: the stop token, and max_tokens, lie within what one step brings."""
    prompt = np.arange(5, dtype=np.int32)
    tokens = expected_output(prompt, 20)
    for fields, count in (({"stop_token_ids": (tokens[6],)}, tokens.index(tokens[6]) + 1), ({"max_tokens": 7}, 7)):
        loop = Loop(widths=(8,))
        loop.scheduler.extension("drafts").width.choose = lambda num_rows, runs: 8
        loop.device.rng = type("Right", (), {"random": lambda self: 0.0})()
        request = make("a", prompt, **{"max_tokens": 20, "per_step": True, **fields})
        loop.scheduler.add_request(request)
        loop.run()
        assert request.output_token_ids.tolist() == tokens[:count]
        assert request.finish_reason == ("stop" if "stop_token_ids" in fields else "length")
        assert loop.scheduler.ranks[0].pool.num_free == loop.config.num_pages


def test_only_accepted_full_pages_are_found():
    """All drafts are wrong: what is found afterwards are the pages of the tokens that came."""
    loop = Loop(widths=(8,))
    loop.scheduler.extension("drafts").width.choose = lambda num_rows, runs: 8
    loop.device.rng = type("Wrong", (), {"random": lambda self: 1.0, "integers": lambda self, most: 0})()
    prompt = np.arange(5, dtype=np.int32)
    first = make("a", prompt, 10)
    loop.scheduler.add_request(first)
    loop.run()
    check_output(first)
    again = make("b", np.append(prompt, first.output_token_ids), 6)
    loop.scheduler.add_request(again)
    loop.run()
    check_output(again)
    # Of 15 tokens the last was never fed: three pages of four.
    assert again.num_cached_tokens == 12


def test_min_tokens_and_what_the_host_prepares_go_token_by_token():
    loop = Loop(widths=(4,))
    loop.scheduler.extension("drafts").width.choose = lambda num_rows, runs: 4
    loop.scheduler.add_request(make("a", [1, 2], 20, params=TokenParams(temperature=0, min_tokens=6)))
    loop.scheduler.add_request(make("b", [1, 3], 20, params=TokenParams(temperature=0, bad_words=((1, 2),))))
    loop.scheduler.add_request(make("c", [1, 4], 20, params=TokenParams(temperature=0, logit_bias={1: 2.0})))
    loop.step()
    widths = []
    for _ in range(8):
        (batch,) = loop.step().batches
        widths.append(batch.num_scheduled.tolist())
    assert [row[1] for row in widths if len(row) > 1] == [1] * len([row for row in widths if len(row) > 1])
    assert [row[0] for row in widths][:5] == [1] * 5 and widths[-1][0] == 4
    assert widths[0][2] == 4


def test_width_follows_what_steps_bring_and_cost():
    choice = DraftWidth({2: 64, 4: 64, 8: 2})
    seen = []
    for _ in range(200):
        width = choice.choose(5, GUESSES)
        seen.append(width)
        # Four tokens for 1.5 times the time of one: right drafts pay.
        choice.observe(width, 5, np.full(5, width - 1), {1: 1.0, 2: 1.2, 4: 1.5}[width])
    assert seen[: 3 * TRIALS] == [4] * TRIALS + [2] * TRIALS + [1] * TRIALS
    assert seen.count(4) > 175
    seen = []
    for _ in range(400):
        width = choice.choose(5, GUESSES)
        seen.append(width)
        choice.observe(width, 5, np.zeros(5, np.int64), {1: 1.0, 2: 1.2, 4: 1.5}[width])
    assert seen[100:].count(1) > 270
    # It lost, and is tried again; where drafts are right again it wins again.
    assert any(width > 1 for width in seen[-MOST_RETRY_STEPS:])
    for _ in range(10 * RETRY_STEPS):
        width = choice.choose(5, GUESSES)
        choice.observe(width, 5, np.full(5, width - 1), {1: 1.0, 2: 1.2, 4: 1.5}[width])
    assert width == 4
    assert choice.choose(1, GUESSES[:1]) == 8 and DraftWidth({}).choose(3, GUESSES[:3]) == 1


def test_one_text_after_another():
    """Wrong drafts are given up soon and tried ever more rarely; one that is right brings the widest steps back."""
    choice, cost = DraftWidth({2: 64, 4: 64, 8: 64}), {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6}

    def widths(num_steps, right):
        seen = []
        for _ in range(num_steps):
            seen.append(choice.choose(1, GUESSES[:1]))
            choice.observe(seen[-1], 1, np.array([min(right, seen[-1] - 1)]), cost[seen[-1]])
        return seen

    widths(100, 5)
    wrong = widths(400, 0)
    given_up = wrong.index(1)
    assert given_up <= 9 and set(wrong[given_up:]) == {1, 2}
    trials = np.diff(np.flatnonzero(np.array(wrong[given_up:]) == 2))
    assert trials[0] == 2 * RETRY_STEPS and set(trials[1:]) == {MOST_RETRY_STEPS}
    # A trial whose draft is right, and another prompt.
    assert widths(MOST_RETRY_STEPS - 1 - wrong[::-1].index(2), 0)[-1] == 1
    assert widths(2, 5) == [2, 8]
    assert 1 in widths(10, 0)
    choice.prefilled()
    assert widths(2, 5) == [8, 8]
    assert 1 in widths(10, 0)
    choice.prefilled()
    assert 8 in widths(3, 0) and 8 not in widths(RETRY_STEPS, 0)[3:]


# Of answers of the default model to prompts of `python -m benchmarks drafts`: after each token, how many of seven
# drafts that are looked up are right.
ANSWERS = {
    "edit": "777777777210777777765032100007070107777777777707654320000654301",
    "summarise": "777777777210777777765032100007070107777777777707770777770654021",
    "code": "065410100010077776103210321010000000210001000321000001001010000",
    "chat": "0" * 63,
}


@pytest.mark.parametrize("cost", [{1: 1.0, 2: 1.1, 4: 1.15, 8: 1.25}, {1: 1.0, 2: 1.6, 4: 1.8, 8: 2.0}], ids=str)
def test_answers_cost_hardly_more_than_at_the_best_width(cost):
    """One request at a time, every answer behind every other; what a step brought is known a step later."""

    def cost_of(answer, choose, observe):
        done = spent = 0
        while done < len(answer):
            width = choose()
            accepted = min(int(answer[done]), width - 1)
            done, spent = done + accepted + 1, spent + cost[width]
            observe(width, accepted)
        return spent

    choice, waiting = DraftWidth({2: 64, 4: 64, 8: 64}), [(1, 0)]

    def observe(width, accepted):
        waiting.append((width, accepted))
        width, accepted = waiting.pop(0)
        choice.observe(width, 1, np.array([accepted]), cost[width])

    best = {
        name: min(cost_of(answer, lambda width=width: width, lambda *told: None) for width in cost)
        for name, answer in ANSWERS.items()
    }
    cost_of(ANSWERS["chat"], lambda: choice.choose(1, GUESSES[:1]), observe)  # all widths are tried
    for name in [name for first in ANSWERS for second in ANSWERS for name in (first, second)]:
        choice.prefilled()
        assert cost_of(ANSWERS[name], lambda: choice.choose(1, GUESSES[:1]), observe) < 1.2 * best[name], name


def test_short_texts_without_a_right_draft():
    """Each of a few steps: fewer and fewer of them have drafts, until one is right."""
    choice, cost = DraftWidth({2: 64, 4: 64, 8: 64}), {1: 1.0, 2: 1.3, 4: 1.7, 8: 2.5}

    def num_wide(right):
        choice.prefilled()
        widths = []
        for _ in range(5):
            widths.append(choice.choose(1, GUESSES[:1]))
            choice.observe(widths[-1], 1, np.array([min(right, widths[-1] - 1)]), cost[widths[-1]])
        return sum(width > 1 for width in widths)

    wrong = [num_wide(0) for _ in range(20)]
    assert sum(wrong[-10:]) <= 3
    assert sum(num_wide(7) for _ in range(12)) > 20


def test_width_knows_what_must_be_right():
    """Guesses have been wrong all the time; runs are worth what they are long, and no more."""
    choice, cost = DraftWidth({2: 64, 4: 64, 8: 64}), {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9}
    for width in cost:
        choice.observe(width, 5, np.zeros(200, np.int64), cost[width])
        choice._num_tried[width, 3] = TRIALS

    def choose(*runs):
        choice._retries.clear()  # no trial is due
        return choice.choose(5, np.array(runs))

    assert [choose(*runs) for runs in ([0] * 5, [-1] * 5, [7] * 5, [3] * 5, [1] * 5)] == [1, 1, 8, 4, 2]
    assert [choose(*runs) for runs in ([3, 0, 0, 0, 0], [3, 3, -1, -1, -1], [7, 0, 0, 0, 0])] == [4, 4, 8]
    assert choose(1, 0, 0, 0, -1) == 2 and choose(0, 0, 0, 0, -1) == 1
    kept = choice.kept.copy()
    choice.observe(8, 5, np.empty(0, np.int64), 1.9)
    assert (choice.kept == kept).all()
    # Where nothing can be gained nothing is tried, also with a number of rows that is new.
    assert {choice.choose(20, np.zeros(20, np.int32)) for _ in range(3 * RETRY_STEPS)} == {1}
    assert choice.choose(20, np.full(20, 2)) == 4


def test_the_device_tells_right_from_wrong():
    rng = np.random.default_rng(0)
    tokens = np.arange(4, dtype=np.int32)
    found = {guess(rng, tokens) == next_token(tokens) for _ in range(50)}
    assert found == {True, False}
