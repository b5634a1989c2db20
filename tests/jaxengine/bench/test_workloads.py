"""The recorded workloads are what the README says of them, and the generated ones are seeded and within bounds."""

from __future__ import annotations

import argparse

import pytest

from jaxengine.bench import latency, throughput
from jaxengine.bench.workloads import NAMES, fixed_lengths, ragged_trace, recorded

VOCAB_SIZE = 49152


@pytest.mark.parametrize(
    ("name", "requests", "shortest", "longest", "new_tokens"),
    [("W1", 1, 128, 128, 128), ("W2", 32, 16, 512, 64), ("W3", 16, 1056, 1056, 32), ("CHAT", 1, 37, 37, 64)],
)
def test_recorded_workloads(name, requests, shortest, longest, new_tokens):
    workload = recorded(name)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert len(lengths) == requests and min(lengths) == shortest and max(lengths) == longest
    assert workload.max_tokens == (new_tokens,) * requests
    assert all(0 <= token < VOCAB_SIZE for prompt in workload.prompts for token in prompt)
    assert len(workload.reference) == requests
    if name != "CHAT":
        assert all(len(reference) == new_tokens for reference in workload.reference)
    assert workload.max_model_len == longest + new_tokens


def test_the_shared_prefix_is_shared_and_no_longer():
    workload = recorded("W3")
    assert workload.shared_prefix == 1024
    assert len({prompt[:1024] for prompt in workload.prompts}) == 1
    assert len({prompt[:1056] for prompt in workload.prompts}) == 16


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(ValueError, match="W9.*W1, W2, W3, CHAT"):
        recorded("W9")
    assert NAMES == ("W1", "W2", "W3", "CHAT")


def test_a_trace_is_seeded_ragged_and_fits():
    trace = ragged_trace(200, VOCAB_SIZE, 1024, seed=3)
    assert trace == ragged_trace(200, VOCAB_SIZE, 1024, seed=3) != ragged_trace(200, VOCAB_SIZE, 1024, seed=4)
    assert trace.max_model_len <= 1024 and min(map(len, trace.prompts)) >= 4
    assert ragged_trace(50, VOCAB_SIZE, 64).max_model_len <= 64
    # Ragged enough for static batches to wait: the longest of 32 is several times the mean.
    assert max(trace.max_tokens[:32]) > 3 * sum(trace.max_tokens) / 200


def test_fixed_lengths_are_what_was_asked():
    workload = fixed_lengths(3, 5, 7, VOCAB_SIZE)
    assert [len(prompt) for prompt in workload.prompts] == [5, 5, 5] and workload.max_tokens == (7, 7, 7)
    with pytest.raises(ValueError, match="output_len 0"):
        fixed_lengths(3, 5, 0, VOCAB_SIZE)


def test_flags_of_vllms_benchmarks():
    parsers = {module: argparse.ArgumentParser() for module in (latency, throughput)}
    for module, parser in parsers.items():
        module.add_arguments(parser)
        args = parser.parse_args(
            ["--dataset-name", "random", "--backend", "vllm", "--disable-detokenize", "--input-len", "7"]
        )
        assert (args.input_len, args.disable_detokenize) == (7, True)
        with pytest.raises(SystemExit):
            parser.parse_args(["--dataset-name", "sharegpt"])
    args = parsers[throughput].parse_args(["--random-input-len", "5", "--random-output-len", "6"])
    assert (args.input_len, args.output_len) == (5, 6)
