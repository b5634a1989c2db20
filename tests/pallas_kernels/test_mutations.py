"""The conformance checks catch seeded faults: the patterns of all, and a mutant of most kernels.

`python -m tests.pallas_kernels.mutations` runs every mutant of every kernel.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.pallas_kernels.findings import FITTED_TO, IS_FITTED
from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.mutations import GATES, killer, module_of, mutated, source_of, why_not
from tests.pallas_kernels.worker import IDLE_SECONDS, Used
from tests.tables import each_row

MUTANTS = {f"{gate}:{mutant.name}": mutant for gate, module in GATES.items() for mutant in module.MUTANTS}
SAME = pytest.mark.thorough("a fault of the same kind in another kernel")
# What only a running kernel can show: the rest differs from these in its arithmetic.
SAMPLE = [
    "xla:block past the end walked as whole",
    pytest.param("tpu:wait dropped", marks=pytest.mark.versions),
    "tpu-write:meeting runs overtake",
    pytest.param("tpu-products:scales of sums shifted by a group", marks=SAME),
    pytest.param("tpu-lora:rows of others' slots kept", marks=SAME),
    pytest.param("tpu-rows:scales of the rows before", marks=SAME),
    pytest.param("tpu-selected:bits of the groups before, too", marks=SAME),
    pytest.param("gpu-decode:blocks not waited for", marks=pytest.mark.versions),
    pytest.param("gpu-products:scales shifted by a group", marks=SAME),
    pytest.param("gpu-blackwell:sums overwritten as they are read", marks=pytest.mark.versions),
    pytest.param("gpu-blackwell-attention:scaled sums not committed", marks=SAME),
    pytest.param("gpu-lora:rows of others' tiles of slots kept", marks=SAME),
    pytest.param("gpu-triton:merge takes the next row's parts", marks=SAME),
    pytest.param("gpu-selected:sums of empty parts added", marks=SAME),
    pytest.param("gpu-index:keys of a tile's first token", marks=SAME),
]


@each_row("identity", MUTANTS)
def test_pattern_occurs_once_in_a_module_that_can_be_imported(identity):
    mutant = MUTANTS[identity]
    compile(mutated(mutant), str(source_of(mutant)), "exec")
    spec = importlib.util.find_spec(module_of(mutant))
    assert spec is not None and spec.origin == str(source_of(mutant))


def test_every_kernel_has_a_dozen():
    assert min(Counter(identity.split(":")[0] for identity in MUTANTS).values()) >= 12


@pytest.mark.skipif(not IS_FITTED, reason=f"the interpreters' additions are fitted to jax {', '.join(FITTED_TO)}")
@pytest.mark.parametrize("identity", SAMPLE)
def test_mutant_is_caught(identity):
    gate = identity.split(":")[0]
    if reason := why_not(gate):
        pytest.skip(reason)
    assert killer(gate, MUTANTS[identity]) is not None


def test_pattern_that_is_gone_is_an_error():
    gone = Mutant("gone", "kv/update_xla", "no such line", "", ())
    with pytest.raises(ValueError, match="occurs 0 times"):
        source_of(gone)


def test_one_that_waits_for_a_core_does_not_hang():
    python = "print(flush=True); import sys; sys.stdin.read() if {waits} else [None for _ in iter(int, 1)]"
    for waits in (True, False):
        command = [sys.executable, "-c", python.format(waits=waits)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.1)
            used = Used(process.pid)
            used.moved -= 2 * IDLE_SECONDS  # as if it had been given no time for that long
            used.last = float("inf")
            assert (used.up(1000.0) is not None) == waits
            process.kill()
