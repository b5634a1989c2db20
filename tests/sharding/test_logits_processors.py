"""A logits processor finds the tokens of one device where devices split the vocabulary and the requests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from tests.jaxengine.engine.test_logits_processors import CASES, LLM, OPTIONS, TINY, Favour, MaxRepeats
from tests.jaxengine.engine.test_logits_processors import generate, greedy

# Devices have blocks of 128 tokens: of the recorded model's vocabulary the second one would have none.
options = OPTIONS | {"load_format": "dummy", "hf_overrides": {"vocab_size": 300}}
found = []
for sizes in ({}, {"tensor_parallel_size": 2, "data_parallel_size": 2}):
    llm = LLM(str(TINY), logits_processors=[Favour, MaxRepeats], **options, **sizes)
    found.append([each.token_ids for each in generate(llm, [greedy(case) for case in (None, *CASES)])])
assert len(set(map(tuple, found[0]))) == 1 + len(CASES), found[0]
assert found[0] == found[1], found
"""


def test_tokens_are_those_of_one_device():
    flags = os.environ.get("XLA_FLAGS", "")  # those of fast_compile
    env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
