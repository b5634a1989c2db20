"""The command `jaxengine simulate`: what it prints, what it chooses, and which words it refuses."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxengine.commands.cli import main
from jaxengine.plan.speed import speed_of
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.simulate.buckets import best_grids, choose
from jaxengine.simulate.calibrate import _COLD, _PAUSES, MeasuredStep, _errors, _fit, _host
from jaxengine.simulate.costs import Cold, HostCosts, MeasuredCosts, Pause, Tiles
from jaxengine.simulate.loop import StepTime
from jaxengine.simulate.setup import open_setup
from tests.tables import each_row

SMALL = ["--model=smollm2-135m", "--max-num-seqs=8", "--max-num-batched-tokens=256", "--max-model-len=2048"]
TRACE = ["--requests=12", "--rate=40", "--scale=0.2"]


def simulated(tmp_path, *words: str) -> dict:
    """What the command writes as JSON."""
    file = tmp_path / "out.json"
    assert main(["simulate", *SMALL, *words, *TRACE, f"--json={file}"]) == 0
    return json.loads(file.read_text())


def test_a_run_is_reported(tmp_path, capsys):
    found = simulated(tmp_path, "shared", "--chips=l4", "--ttft=0.5", "--itl=0.02", "--efficiency=0.5")
    shown = capsys.readouterr().out
    assert "50% of it reached" in shown and "goodput: " in shown and "time to first token" in shown
    assert found["requests"] == 12 and found["refused"] == 0 and found["prefix_hits"] > 0
    assert found["first_token"]["p50"] <= found["first_token"]["p99"] <= found["end"]["p99"]
    assert sum(found["buckets"].values()) == found["steps"]
    faster = simulated(tmp_path, "shared", "--chips=l4", "--at-once")
    assert faster["first_token"]["mean"] > found["first_token"]["mean"] and faster["seconds"] < found["seconds"]
    assert "good_requests" not in capsys.readouterr().out


def test_a_decode_takes_what_the_roofline_says():
    """One request alone at a length is as fast as the upper bound of `jaxengine plan` for one sequence of it."""
    with open_setup({"model": "smollm2-135m", "max_num_seqs": 1}, "l4", None, 1.0, HostCosts()) as setup:
        speed = speed_of(setup.plan, 1024)
        (seconds,) = setup.costs(setup.plan).seconds(Bucket(1, 1), np.array([1]), np.array([1024]))
        (earlier,) = setup.costs(setup.plan).seconds(Bucket(1, 1), np.array([1]), np.array([16]))
    assert speed is not None and seconds == pytest.approx(speed.token_seconds, rel=0.01) and earlier < seconds


def test_shapes_are_chosen_and_tried(tmp_path, capsys):
    found = simulated(tmp_path, "chat", "--chips=l4", "--optimise=buckets", "--within=5")
    assert found["programs_chosen"] < found["programs_now"]
    option = capsys.readouterr().out.splitlines()[-1]
    assert option.startswith("--compilation-config '{")
    sizes = found["compilation_config"]
    assert json.loads(option.split("'")[1]) == sizes
    given = simulated(tmp_path, "chat", "--chips=l4", f"--compilation-config={json.dumps(sizes)}")
    assert given["buckets"] == found["chosen"]["buckets"]


def test_every_split_is_run(tmp_path, capsys):
    found = simulated(tmp_path, "chat", "--chips=l4:3", "--optimise=parallel")
    sizes = [(row["options"]["tensor_parallel_size"], row["options"]["data_parallel_size"]) for row in found["splits"]]
    assert sorted(sizes) == [(1, 1), (1, 3), (3, 1)]
    ends = [row["end"]["mean"] for row in found["splits"]]
    assert ends == sorted(ends) and capsys.readouterr().out.splitlines()[-1].startswith("-")


def test_the_best_sizes_are_those_of_a_search_through_all():
    rng = np.random.default_rng(4)
    needs = Counter(rng.integers(1, 13, 40).tolist())

    def seconds(size: int) -> float:
        return 1.0 + size**1.5

    grids = best_grids(needs, 13, seconds)
    for count, grid in enumerate(grids[:5], 1):
        options = itertools.combinations(range(1, 13), count - 1)
        tried = [
            sum(n * (seconds(min(s for s in (*own, 13) if s >= size)) - seconds(size)) for size, n in needs.items())
            for own in options
        ]
        assert grid.sizes[-1] == 13 and len(grid.sizes) == count and grid.lost == pytest.approx(min(tried))
    assert grids[-1].lost == pytest.approx(0.0)


def test_the_fewest_shapes_within_a_share_are_chosen():
    table = ((1, 0.0), (100, 100.0))
    costs = MeasuredCosts("", "cpu", {}, 1, table, table, Tiles(), 0.0, 0.0, Cold(), (), (), HostCosts(), (0.0, 0.0), 0)
    steps = [StepTime(Bucket(64, 64), 10, 10, 10, 10, 64.0, 0.0, 0.0, 10)] * 99
    steps.append(StepTime(Bucket(64, 64), 60, 60, 60, 60, 64.0, 0.0, 0.0, 10))
    assert choose(steps, costs, 64, 128, 0.02).decode == (10,)  # four of 64 seconds lost on one step of a hundred
    assert choose(steps, costs, 64, 128, 0.0).decode == (10, 60)
    assert choose(steps, costs, 64, 128, 10.0).decode == ()
    assert choose(steps, None, 64, 128, 0.001).decode == (10, 60) and choose(steps, None, 64, 128, 0.01).decode == (10,)
    # The table says that sizes cost the same; attention pads rows.
    flat = replace(costs, decode=((1, 1.0), (64, 1.0)), mixed=((1, 1.0), (128, 1.0)), tiles=Tiles(rows=64), per_key=0.1)
    own = [replace(step, seconds=65.0) for step in steps]
    assert choose(own, flat, 64, 128, 0.02).decode == (10,)
    assert choose(own, replace(flat, tiles=Tiles()), 64, 128, 0.02).decode == ()


def test_attention_counts_padded_tiles():
    counts, lengths = np.array([1, 1, 1, 5, 1, 20]), np.array([7, 300, 40, 5, 10, 30])
    decodes, mixed = Bucket(8, 8), Bucket(64, 8)
    single = counts == 1
    assert Tiles().attended(decodes, counts[single], lengths[single]) == (357, 0)
    pairs = sum(range(1, 6)) + sum(range(11, 31))
    assert Tiles().attended(mixed, counts, lengths) == (357, pairs)
    tiles = Tiles(rows=2, tokens=16, keys=128, keys_alone=256)
    # Rows of 300 and 40 share a tile of three blocks, those of 10 and 7 one; chunks have one and two tiles.
    assert tiles.attended(mixed, counts, lengths) == (2 * (384 + 128), 16 * 128 * 3)
    assert tiles.attended(Bucket(1, 1), np.array([1]), np.array([3])) == (256, 0)
    assert replace(tiles, rows=16).attended(decodes, counts[single], lengths[single]) == (8 * 384, 0)
    assert tiles.attended(mixed, np.empty(0), np.empty(0)) == (0, 0)


# Place in _COLD of the caches of the next test.
PLANTED = _COLD.index(Cold(256.0, 0.05, 0.6))


def test_planted_costs_are_found_among_steps_that_were_held_up():
    rng, steps, colds = np.random.default_rng(0), [], np.zeros(len(_COLD))
    for _ in range(240):  # loads: a pause, steps with prompts, decodes
        size, idle, chunks = (rng.choice(each) for each in ((1, 4, 16), _PAUSES, (1, 1, 2, 4)))
        colds = np.array([each.paused(own, idle) for each, own in zip(_COLD, colds, strict=True)])
        for own in [128] * chunks + [int(size)] * 6:
            bucket = Bucket(own, min(own, 16))
            keys = float(rng.integers(1, 400) * (own if bucket.decode_only else 1))
            pairs = 0.0 if bucket.decode_only else float(rng.integers(1, 100)) * keys
            cold = colds[PLANTED] * (0.002 + 0.0002 * own * bucket.decode_only)
            seconds = 0.001 + 0.0001 * own + 1e-6 * keys + 1e-7 * pairs + cold + 0.02 * min(idle, 0.1)
            held_up = 5.0 if rng.random() < 0.15 else 1.0
            step = StepTime(bucket, 0, 0, 0, 1, 0.0, keys, pairs)
            host = 0.0001 + 0.0003 * (not bucket.decode_only) + 0.0005 * colds[PLANTED] + 0.01 * idle, 0.0002
            steps.append(MeasuredStep(step, seconds * held_up * rng.lognormal(0, 0.02), *host, colds, idle))
            colds, idle = np.array([each.after(old, bucket) for each, old in zip(_COLD, colds, strict=True)]), 0.0
    fit = _fit(steps)
    assert fit.decode == pytest.approx({1: 0.0011, 4: 0.0014, 16: 0.0026}, rel=0.05)
    assert fit.mixed == pytest.approx({128: 0.0138}, rel=0.05)
    assert (fit.per_key, fit.per_pair) == pytest.approx((1e-6, 1e-7), rel=0.05)
    assert fit.cold == PLANTED and _errors(fit, steps)[0] < 0.03
    assert fit.cold_decode == pytest.approx({1: 0.0022, 4: 0.0028, 16: 0.0052}, rel=0.1)
    assert fit.cold_mixed == pytest.approx({128: 0.002}, rel=0.5)  # of steps that take seven times as long
    assert fit.pauses == pytest.approx((0.0004, 0.002, 0.002), rel=0.5)
    host, pauses = _host(steps, fit)
    assert host.dispatch + host.dispatch_row == pytest.approx(0.0001)
    assert (host.dispatch_prompts, host.dispatch_cold) == pytest.approx((0.0003, 0.0005))
    assert host.after + host.after_row == pytest.approx(0.0002) and pauses == pytest.approx((0.0002, 0.001, 0.005))


def test_prompts_and_pauses_cool_the_caches():
    cold, table = Cold(tokens=16 / math.log(2), idle=0.1 / math.log(2), remains=0.5), ((1, 0.01), (1024, 0.01))
    lost, more = (((1, seconds), (1024, seconds)) for seconds in (0.008, 0.016))
    costs = MeasuredCosts(
        "", "cpu", {}, 1, table, table, Tiles(), 0.0, 0.0, cold, lost, more, HostCosts(), (0.0, 0.0), 0
    )
    costs = replace(costs, pauses=(Pause(0.1, 0.004, 0.002),))
    none, decode = np.empty(0), Bucket(1, 1)
    assert costs.cold_after(0.0, Bucket(16, 4)) == pytest.approx(0.5)
    assert costs.cold_after(0.5, Bucket(32, 4)) == pytest.approx(0.875) and costs.cold_after(0.875, decode) == 0.4375
    assert costs.seconds(decode, none, none, 0.5) == pytest.approx([0.014])
    assert costs.seconds(Bucket(16, 4), none, none, 0.5) == pytest.approx([0.018])
    assert costs.idle(0.5, 0.1) == pytest.approx((0.75, 0.004, 0.002))
    assert costs.idle(0.0, 0.05) == pytest.approx((1 - 0.5**0.5, 0.002, 0.001)) and costs.idle(0.0, 9.0)[1] == 0.004


@each_row(
    "words, said",
    [
        (["chat"], "chips is None; allowed: the name of a chip, or --costs"),
        (["chat", "--chips=v9"], "chips is 'v9'"),
        (
            ["chat", "--chips=cpu"],
            "chips is 'cpu'; allowed: chips with known figures, or a file of jaxengine calibrate",
        ),
        (["nothing.jsonl", "--chips=l4"], "nothing.jsonl"),
        (["chat", "--chips=l4", "--costs=nothing.json"], "nothing.json"),
        (["~nosuchuser/trace", "--chips=l4"], "trace '~nosuchuser/trace' cannot be the name of a file"),
        (["chat", "--chips=l4", "--costs=~nosuchuser/c"], "costs '~nosuchuser/c' cannot be the name of a file"),
        ([__file__, "--chips=l4", "--rate=2"], "rate is 2.0; allowed: absent with a file"),
        ([__file__, "--chips=l4"], f"line 1 of {__file__} begins with"),
        (["chat", "--chips=l4", f"--costs={__file__}"], "allowed: a file that jaxengine calibrate-costs wrote"),
        (["shared", "--chips=l4", "--max-model-len=1024"], "max_model_len is 1024; allowed: more than 1024"),
        (["agents", "--chips=l4", "--max-model-len=3", "--scale=0.001"], "max_model_len is 3; allowed: at least 4"),
        (["chat", "--chips=l4", "--router=prefix"], "router is ['prefix']; allowed: absent without --replicas"),
        (["chat", "--chips=l4", "--deaths=0"], "deaths is 0; allowed: absent without --replicas"),
        (["chat", "--chips=l4", "--replicas=10001"], "replicas is 10001; allowed: at most 10000"),
        (
            ["chat", "--chips=l4", "--replicas=2", "--optimise=buckets"],
            "optimise is 'buckets'; allowed: absent with --replicas",
        ),
        (["chat", "--chips=l4", "--enable-lora"], "a trace does not say which adapters"),
        (
            ["chat", "--chips=l4", '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}'],
            "how many drafts",
        ),
    ],
)
def test_wrong_words_are_named(capsys, words, said):
    assert main(["simulate", "--model=smollm2-135m", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_seed_is_not_negative(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "chat", "--chips=l4", "--trace-seed=-1"])
    assert "'-1' is not a whole number from 0" in capsys.readouterr().err
