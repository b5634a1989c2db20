"""Traces: three forms are read as they are, a wrong line is named, and prefixes are shared as ids say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxengine.config.base.errors import ConfigError
from jaxengine.records.trace_file import header_line, request_line
from jaxengine.simulate.synthetic import synthetic
from jaxengine.simulate.trace import read_trace, trace_of
from tests.tables import each_row

HEADER = '{"jaxengine_trace": 1, "block_size": 4}\n'
GOOD = '{"arrival": 0, "prompt_tokens": 9, "output_tokens": 2}\n'


def test_mooncake_and_azure_are_read_as_they_are(tmp_path):
    mooncake = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [*range(46, 59), 2353]},
        {"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [*range(46, 58), 2366]},
    ]
    mooncake.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(str(mooncake))
    assert trace.block_size == 512 and [each.arrival for each in trace.requests] == [0.0, pytest.approx(3.053)]
    first, second = trace.tokens(0), trace.tokens(1)
    assert len(first) == 6955 + 52 and len(second) == 6472 + 26
    assert (first[: 12 * 512] == second[: 12 * 512]).all() and not np.isin(second[12 * 512 :], first).any()

    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n2024-05-10 00:00:00.009930+00:00,2162,0\r\n"
    )
    trace = read_trace(str(azure))
    assert [(each.num_prompt, each.num_output) for each in trace.requests] == [(374, 44), (396, 109), (2162, 1)]
    assert trace.requests[1].arrival == pytest.approx(4.314579, abs=1e-6)


def test_a_trace_is_written_and_read_again(tmp_path):
    trace = synthetic("shared", 50, 2.0, 4096)
    file = tmp_path / "own.jsonl"
    file.write_text(header_line(trace.block_size) + "".join(map(request_line, trace.requests)))
    again = read_trace(str(file))
    assert again.requests[-1].arrival == pytest.approx(trace.requests[-1].arrival, abs=1e-5) and again.block_size == 16
    assert [(each.num_prompt, each.num_output, each.hash_ids) for each in again.requests] == [
        (each.num_prompt, each.num_output, each.hash_ids) for each in trace.requests
    ]
    with pytest.raises(ConfigError, match="rate is inf; allowed: at most 10,000 for agents"):
        synthetic("agents", 50, float("inf"), 4096)
    assert synthetic("shared", 50, 2.0, 4096) == trace != synthetic("shared", 50, 2.0, 4096, seed=1)


def test_blocks_are_the_same_where_all_before_them_is():
    trace = trace_of("three", [[1, 2, 3, 4, 5], [1, 2, 3, 4], [9, 9, 3, 4]], [2, 1, 1], 2)
    first, second, third = (trace.tokens(index) for index in range(3))
    assert (first[:4] == second[:4]).all() and first[0] == first[1] != first[2] and third[3] != first[3]
    assert first[4] == first[6] and second[4] not in first


@each_row(
    "text, said",
    [
        ("", "line 1 of "),
        (
            "x,y\n",
            "begins with 'x,y'; allowed: JSON lines of jaxengine or Mooncake, or CSV that begins with TIMES",
        ),
        ("[1]\n", "line 1 of "),
        ("{" * 100_000, "a JSON object"),
        ('{"jaxengine_trace": 2, "block_size": 4}\n', "line 1 of "),
        ('{"jaxengine_trace": 1, "block_size": 0}\n', "has block_size 0; allowed: a whole number from 1 to"),
        (HEADER, "without a request"),
        (HEADER + GOOD + "\n" + GOOD.replace("9", "-9"), "line 4 of "),
        (HEADER + GOOD.replace("9", "true"), "has prompt_tokens True"),
        (HEADER + GOOD.replace("9", "1" + "0" * 400), "has prompt_tokens 1000"),
        (HEADER + GOOD.replace("9", "1" + "0" * 5000), "a JSON object"),
        (HEADER + GOOD.replace('"arrival": 0', '"arrival": NaN'), "has arrival nan; allowed: a number from 0 to 1e+09"),
        (HEADER + GOOD.replace('"arrival": 0', '"arrival": 1' + "0" * 400), "has arrival 1000"),
        (HEADER + GOOD.replace('"arrival": 0, ', ""), "has arrival nothing"),
        (HEADER + GOOD.replace("2}", '2, "max_tokens": 1}'), "has max_tokens 1; allowed: at least output_tokens, 2"),
        (HEADER + GOOD.replace("2}", '2, "hash_ids": [1, 2, 3, 4]}'), "has 4 hash_ids; allowed: at most 3"),
        (HEADER + GOOD.replace("2}", '2, "hash_ids": [-1]}'), "has -1 in hash_ids"),
        (HEADER + GOOD.replace("2}", '2, "hash_ids": 5}'), "has hash_ids 5; allowed: a list"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n", "line 2 of "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "has TIMESTAMP 'now'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1.5,1\n", "has ContextTokens '1.5'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "1" * 200_000 + ",1,1\n", "is not a line of CSV: field larger"),
        (b'{"timestamp": "\xff"}', "is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, said):
    file = tmp_path / "trace"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        read_trace(str(file))
    assert said in str(error.value) and "; allowed: " in str(error.value), error.value
