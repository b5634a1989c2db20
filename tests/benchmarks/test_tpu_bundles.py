"""Which bundles of a compiled TPU kernel count for a block of keys, on a program written for this, and the cycles that
they are compared with.
"""

from __future__ import annotations

from benchmarks.tpu.tpu_bundles import Pass, Program
from benchmarks.tpu.tpu_peers import peak_cycles

MULTIPLY = "%1 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0 %v2_v0"
FETCH = "%3 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s4_s5"
TO = "4 = sbr.rel (%p5_p0) target = $region"


def dump(*bundles: tuple[str, str, str]) -> str:
    """Return (label, instruction, comment) of each bundle as libtpu writes them."""
    lines = [
        f"{hex(at) if at else '0':>6} {label:>2} : > {{ {text} }} /* {comment} */"
        for at, (label, text, comment) in enumerate(bundles)
    ]
    return "= control target key start\nLB: loop body\n\n" + "\n".join(lines) + "\n"


def kernel(masked: list[str], other: list[str]) -> str:
    """Return the dump of a loop over blocks with two forms of the arithmetic, each the instructions given."""
    # One bundle after a branch is run whether or not it is taken.
    return dump(
        ("", "", ""),
        ("LB", "", "Start region 1"),
        ("", TO + "2", ""),  # if there is a block to fetch
        ("", "", ""),
        ("", FETCH, ""),
        ("", TO + "3", ""),  # a block that is not full fetches in a loop
        ("", "", ""),
        ("LB", FETCH, "Start region 4"),
        ("", TO + "4", ""),
        ("", "", "End region 4"),
        ("PF", "", "Start/End empty region 2 :: Start/End empty region 3"),
        ("", TO + "5", ""),
        ("", "", ""),
        *[("", text, "") for text in masked],
        ("PF", TO + "6", "Start/End empty region 5"),
        ("", "", ""),
        *[("", text, "") for text in other],
        ("PF", "", "Start/End empty region 6"),
        ("", TO + "1", ""),
        ("", "", "End region 1"),
        ("", "", ""),
    )


INNER = dump(
    ("", "", ""),
    ("LB", FETCH, "Start region 1"),
    ("", TO + "7", ""),  # a loop that may have no passes
    ("", "", ""),
    ("LB", MULTIPLY, "Start region 2"),
    ("", TO + "2", ""),
    ("", "", ""),
    ("PF", "", "Start/End empty region 7"),
    ("", TO + "1", ""),
    ("", "", ""),
    ("PF", "", ""),
)


def test_a_full_block_in_the_middle_counts():
    outside = 14  # of the loop, without the two forms and the fetches of a block that is not full
    for masked, other, counted in (
        ([MULTIPLY] * 3, [MULTIPLY] * 4, 4),  # the form that multiplies most
        ([MULTIPLY] * 4, [MULTIPLY] * 4 + [""], 4),  # and of equal ones the shorter
        ([MULTIPLY] * 4 + [""], [MULTIPLY] * 4 + ["", ""], 5),
    ):
        program = Program(kernel(masked, other))
        (loop,) = program.block_loops()
        assert loop.first == 1
        assert program.measure(loop) == Pass(arithmetic=counted, whole=outside + counted)
    program = Program(INNER)
    (loop,) = program.block_loops()
    assert program.measure(loop, trips=3) == Pass(arithmetic=9, whole=6 + 9)
    assert Program(INNER.replace(FETCH, "nop")).block_loops() == []


def test_cycles_at_peak_are_of_one_core():
    # A core of v5p has four matrix units of 128 x 128; one of v6e or tpu7x has two of 256 x 256 at two rows a cycle.
    for target, head_dim, cycles in (
        ("v5p", 128, 16384),
        ("v5p", 64, 16384),
        ("v5p", 256, 32768),
        ("v6e", 128, 8192),
        ("v6e", 256, 8192),
        ("tpu7x", 128, 8192),
    ):
        assert abs(peak_cycles(target, "prefill", (32, 8), head_dim) / cycles - 1) < 0.01
        assert abs(peak_cycles(target, "decode", (32, 8), head_dim) / cycles - 1 / 128) < 0.01
