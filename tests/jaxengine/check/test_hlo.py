"""Reading HLO: which instructions count as a copy of a protected array, and which do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxengine.check.compiled.hlo import MustNotCopy, copies, parse
from tests.tables import each_row

POOL, WEIGHT = 64 * 4 * 8, 32 * 16
MUST_NOT_COPY = MustNotCopy({POOL: "pool", POOL // 2: "a layer's pool"}, {WEIGHT: "weight"}, {"s32[8,16]": "counts"})


def module(*lines: str, fused: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, is_scheduled=true\n\n{fused}\nENTRY %main (p: f32[1]) -> f32[1] {{\n{body}\n}}\n"


FUSED_SCATTER = """%fused (a: f32[64,4,8], b: f32[2,4,8]) -> f32[64,4,8] {
  %a = f32[64,4,8]{2,1,0} parameter(0)
  %b = f32[2,4,8]{2,1,0} parameter(1)
  ROOT %s = f32[64,4,8]{2,1,0} scatter(%a, %b), to_apply=%r
}
"""
FUSED_SELECT = FUSED_SCATTER.replace("ROOT %s", "%s").replace(
    "\n}", "\n  ROOT %w = f32[64,4,8]{2,1,0} select(%a, %s, %a)\n}"
)
W = "%w = f32[32,16]{1,0} parameter(0)"
PREFETCH = "%c = (bf16[32,16]{1,0:T(8,128)S(1)}, bf16[32,16]{1,0}, u32[]) copy-start(%w)"
PUT_BACK = [
    PREFETCH,
    "%d = f32[32,16]{1,0:T(8,128)S(1)} copy-done(%c)",
    "%e = (f32[32,16]{1,0:T(8,128)}, f32[32,16]{1,0:T(8,128)S(1)}, u32[]) copy-start(%d)",
]
REFORMAT = "%u = ((f32[32,16]{1,0}), f32[32,16]{0,1}, (s32[4]{0})) async-update(%start, %w)"
OFFLOADED_COPY = """%called (o: f32[32,16]) -> f32[32,16] {
  %o = f32[32,16]{1,0} parameter(0)
  ROOT %c = f32[32,16]{0,1} copy(%o)
}, execution_thread="sparsecore"
"""
CARRIED = [
    "%t = (s32[], f32[32,16]{1,0:T(8,128)}) parameter(0)",
    "%g = f32[32,16]{1,0:T(8,128)} get-tuple-element(%t), index=1",
    "%c = f32[32,16]{0,1} copy(%g)",
]
FUSION = "%f = f32[64,4,8]{2,1,0} fusion(%p, %q), kind=kLoop, calls=%fused"


@each_row(
    ("lines", "fused", "expected"),
    [
        (["%p = f32[64,4,8]{2,1,0} parameter(0)", "%c = f32[64,4,8]{2,1,0} copy(%p)"], "", ["pool"]),
        (["%c = bf16[64,32]{1,0:T(8,128)(2,1)} convert(%x)"], "", ["pool"]),
        (["%b = f32[64,4,8]{2,1,0} broadcast(%zero), dimensions={}"], "", ["pool"]),
        (["%s = f32[32,4,8]{2,1,0} dynamic-slice(%p, %i)"], "", ["a layer's pool"]),
        ([FUSION], FUSED_SCATTER, []),
        ([FUSION], FUSED_SELECT, ["pool"]),
        (["%k = f32[64,4,8]{2,1,0} custom-call(%p), output_to_operand_aliasing={{}: (0, {})}"], "", []),
        (['%k = f32[64,4,8]{2,1,0} custom-call(%p), custom_call_target="tpu_custom_call"'], "", ["pool"]),
        (["%w = (f32[64,4,8]{2,1,0}, s32[]) while(%t), condition=%c, body=%b"], "", []),
        ([W, "%t = f32[16,32]{0,1} transpose(%w), dimensions={1,0}"], "", ["weight"]),
        ([W, "%b = f32[512]{0} bitcast(%w)", "%c = f32[32,16]{0,1} copy(%b)"], "", ["weight"]),
        # An activation of a weight's size: what it is made of is no parameter.
        (["%d = f32[32,16]{1,0} dot(%x, %y)", "%c = f32[32,16]{0,1} copy(%d)"], "", []),
        # A prefetch into on-chip memory.
        ([W, PREFETCH], "", []),
        ([W, PREFETCH, "%d = f32[32,16]{1,0:S(1)} copy-done(%c)", "%e = f32[32,16]{0,1} copy(%d)"], "", ["weight"]),
        # Put back to make room; turned meanwhile.
        ([W, *PUT_BACK], "", []),
        ([W, *(line.replace("{1,0:T(8,128)}", "{0,1:T(8,128)}") for line in PUT_BACK)], "", ["weight"]),
        # What a loop is given, which is no weight where it lies on the chip.
        (CARRIED, "", ["weight"]),
        ([line.replace(":T(8,128)", ":T(8,128)S(1)") for line in CARRIED], "", []),
        (["%s = s32[8,16]{1,0} parameter(0)", "%c = s32[8,16]{1,0} copy(%s)"], "", ["counts"]),
        (["%s = f32[8,16]{1,0} parameter(0)", "%c = f32[8,16]{1,0} copy(%s)"], "", []),
        # Handed to the SparseCore, where a computation of its own copies its parameter, whatever that is.
        ([W, REFORMAT], OFFLOADED_COPY, ["weight"]),
        (["%w = f32[32,16]{1,0} dot(%x, %y)", REFORMAT], OFFLOADED_COPY, []),
        ([W, REFORMAT.replace("{0,1}", "{1,0}")], OFFLOADED_COPY, []),
    ],
)
def test_copies(lines, fused, expected):
    assert [found.partition(":")[0] for found in copies(parse(module(*lines, fused=fused)), MUST_NOT_COPY)] == expected


def compiled_text(function, *arguments, donate=()):
    text = jax.jit(function, donate_argnums=donate).lower(*arguments).compile().as_text()
    assert text is not None
    return text


@pytest.mark.parametrize(("donate", "expected"), [((0,), 0), ((), 1)])
def test_a_compiled_update_copies_only_what_is_not_donated(donate, expected):
    pool, rows, index = jnp.zeros((64, 4, 8)), jnp.zeros((2, 4, 8)), jnp.zeros(2, jnp.int32)
    text = compiled_text(lambda pool, rows, index: pool.at[index].set(rows), pool, rows, index, donate=donate)
    assert len(copies(parse(text), MUST_NOT_COPY)) == expected


@pytest.mark.parametrize("memory", ["", ":S(1)"], ids=["far", "on the chip"])
@pytest.mark.parametrize(("given", "copied"), [("%pool", 1), ("%x", 0), ("%moved", 1)])
def test_a_branch_copies_what_its_conditional_is_given(given, copied, memory):
    """An activation may have a pool's shape: 1,024 tokens beside 64 slots of rank 16."""
    text = f"""HloModule m

%branch (args: (s32[], bf16[1024,64])) -> bf16[1024,64] {{
  %args = (s32[], bf16[1024,64]{{1,0}}) parameter(0)
  %one = bf16[1024,64]{{1,0{memory}}} get-tuple-element(%args), index=1, metadata={{}}
  ROOT %c = bf16[1024,64]{{1,0}} copy(%one), metadata={{}}
}}

%other (none: (s32[])) -> bf16[1024,64] {{
  %none = (s32[]) parameter(0)
  ROOT %z = bf16[1024,64]{{1,0}} broadcast(%zero), dimensions={{}}
}}

ENTRY %main (pool: bf16[1024,64], i: s32[]) -> bf16[1024,64] {{
  %pool = bf16[1024,64]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[1024,64]{{1,0}} add(%a, %b), metadata={{}}
  %moved = bf16[1024,64]{{1,0}} bitcast(%pool), metadata={{}}
  %first = (s32[]) tuple(%i), metadata={{}}
  %second = (s32[], bf16[1024,64]{{1,0}}) tuple(%i, {given}), metadata={{}}
  ROOT %r = bf16[1024,64]{{1,0}} conditional(%i, %first, %second), branch_computations={{%other, %branch}}
}}
"""
    assert len(copies(parse(text), MustNotCopy(states={"bf16[1024,64]": "adapters"}))) == copied


@pytest.mark.parametrize(("given", "copied"), [("%near", 1), ("%x", 0)])
def test_a_loop_copies_a_weight_that_was_brought_onto_the_chip(given, copied):
    """What it computes itself, or is given of what was computed, may be as large as a weight."""
    text = f"""HloModule m

%body (args: (s32[], f32[32,16])) -> (s32[], f32[32,16]) {{
  %args = (s32[], f32[32,16]{{1,0:S(1)}}) parameter(0)
  %n = s32[] get-tuple-element(%args), index=0, metadata={{}}
  %one = f32[32,16]{{1,0:S(1)}} get-tuple-element(%args), index=1, metadata={{}}
  %c = f32[32,16]{{0,1}} copy(%one), metadata={{}}
  ROOT %t = (s32[], f32[32,16]{{1,0:S(1)}}) tuple(%n, %one), metadata={{}}
}}

%cond (state: (s32[], f32[32,16])) -> pred[] {{
  %state = (s32[], f32[32,16]{{1,0:S(1)}}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (w: f32[32,16], i: s32[]) -> (s32[], f32[32,16]) {{
  %w = f32[32,16]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %start = (f32[32,16]{{1,0:S(1)}}, f32[32,16]{{1,0}}, u32[]) copy-start(%w), metadata={{}}
  %near = f32[32,16]{{1,0:S(1)}} copy-done(%start), metadata={{}}
  %x = f32[32,16]{{1,0:S(1)}} add(%a, %b), metadata={{}}
  %init = (s32[], f32[32,16]{{1,0:S(1)}}) tuple(%i, {given}), metadata={{}}
  ROOT %r = (s32[], f32[32,16]{{1,0:S(1)}}) while(%init), condition=%cond, body=%body
}}
"""
    assert len(copies(parse(text), MUST_NOT_COPY)) == copied
