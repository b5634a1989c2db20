"""Operations and bytes counted out of HLO, by hand and of a program that this machine compiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxengine.check.compiled.counts import moved_bytes, operations
from jaxengine.check.compiled.hlo import Module, attending_places, parse
from tests.tables import each_row

LAYOUT = "{1,0:T(8,128)(2,1)}"


KERNEL = 'custom-call(%p, %w, %w), custom_call_target="tpu_custom_call"'
IN_PLACE = "output_to_operand_aliasing={{}: (2, {})}"
SAYS = 'backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"%d","flops":"0"}}}'


def module(*lines: str, more: str = "") -> Module:
    body = "\n".join(f"  {line}" for line in lines)
    return parse(f"HloModule m\n\n{more}\nENTRY %main (p: f32[1]) -> f32[1] {{\n{body}\n}}\n")


P = f"%p = bf16[8,64]{LAYOUT} parameter(0), sharding={{replicated}}"
W = f"%w = bf16[64,128]{LAYOUT} parameter(1)"


@pytest.mark.parametrize(
    "line",
    [
        "%y = f32[8,128]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        f"%y = f32[8,128]{LAYOUT} convolution(%p, %w), dim_labels=bf_io->bf",
        '%y = (f32[8,128]{1,0}, s8[33]{0}) custom-call(%p, %w), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
    ],
)
def test_a_product(line):
    assert operations(module(P, W, line)) == {"bf16": 2 * 8 * 64 * 128}


def test_the_wider_operand_is_what_is_computed_in():
    wide = "%w = f32[64,128]{1,0} convert(%v)"
    line = "%y = f32[8,128]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert operations(module(P, wide, line)) == {"f32": 2 * 8 * 64 * 128}


def test_batches_are_spatial_dimensions():
    x = "%x = bf16[4,8,64]{2,1,0} parameter(0)"
    w = "%v = bf16[4,64,128]{2,1,0} parameter(1)"
    line = "%y = f32[4,8,128]{2,1,0} convolution(%x, %v), window={size=4 stride=3}, dim_labels=0bf_0io->0bf"
    assert operations(module(x, w, line)) == {"bf16": 2 * 4 * 8 * 64 * 128}


def test_a_ragged_product_of_a_tpu_is_not_counted():
    """As libtpu 0.0.52 writes it. Without the scope it is a product of every row with every matrix, as is what XLA:GPU
    makes of one."""
    x = "%x = bf16[4,8,64]{2,1,0} parameter(0)"
    w = "%v = bf16[4,64,128]{2,1,0} parameter(1)"
    line = (
        "%y = f32[4,8,128]{2,1,0} convolution(%x, %v), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf"
    )
    scope = 'metadata={op_name="jit(forward)/layer_3/mlp/gate_up/ragged_dot_general" stack_frame_id=3}'
    assert operations(module(x, w, f"{line}, {scope}")) == {}
    assert operations(module(x, w, line)) == {"bf16": 4 * 2 * 8 * 64 * 128}
    dot = "%y = f32[8,128]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert operations(module(P, W, f"{dot}, {scope}")) == {"bf16": 2 * 8 * 64 * 128}


def test_loops_and_what_is_inside_of_fusions():
    inside = """%fused (a: bf16[8,64], b: bf16[64,128]) -> f32[8,128] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[64,128]{1,0} parameter(1)
  ROOT %d = f32[8,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (c: f32[8,128]) -> f32[8,128] {
  %c = (bf16[8,64]{1,0}, bf16[64,128]{1,0}) parameter(0)
  %e = bf16[8,64]{1,0} get-tuple-element(%c), index=0
  %f = bf16[64,128]{1,0} get-tuple-element(%c), index=1
  %h = f32[8,128]{1,0} fusion(%e, %f), kind=kOutput, calls=%fused
}
"""
    known = '%l = (bf16[8,64]) while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    once = "%l = (bf16[8,64]) while(%p), condition=%c, body=%body"
    product, moved = 2 * 8 * 64 * 128, 2 * (8 * 64 + 64 * 128) + 4 * 8 * 128
    assert operations(module(P, known, more=inside)) == {"bf16": 5 * product}
    assert moved_bytes(module(P, known, more=inside), ()) == 5 * moved
    assert operations(module(P, once, more=inside)) == {"bf16": product}
    nested = f"{inside}\n%nested (p: bf16[8,64]) -> (bf16[8,64]) {{\n  {P}\n  {once}\n}}\n"
    outer = module(P, once.replace("body=%body", "body=%nested"), more=nested)
    assert [moved_bytes(outer, (), trips) for trips in ((), (3,), (3, 2))] == [moved, 3 * moved, 6 * moved]
    # Of branches the dearest one, wherever it stands.
    inside += f"\n%many (p: bf16[8,64]) -> (bf16[8,64]) {{\n  {P}\n  {known}\n}}\n"
    for branches in (
        "branch_computations={%body, %many}",
        "branch_computations={%many, %body, %body}",
        "true_computation=%body, false_computation=%many",
    ):
        either = module(P, f"%l = (bf16[8,64]) conditional(%i, %p, %p), {branches}", more=inside)
        assert operations(either) == {"bf16": 5 * product}
        assert moved_bytes(either, ()) == 5 * moved
    without = module(P, "%l = (bf16[8,64]) conditional(%i, %p, %p), branch_computations={}", more=inside)
    assert operations(without) == {} and moved_bytes(without, ()) == 0


FUSED = """%fused (a: bf16[8,64], b: bf16[64,128]) -> bf16[8,64] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[64,128]{1,0} parameter(1)
  %r = bf16[2,64]{1,0} slice(%b), slice={[0:2], [0:64]}
  ROOT %d = bf16[8,64]{1,0} dynamic-update-slice(%a, %r, %i, %i)
}

%new (o: bf16[], n: bf16[]) -> bf16[] {
  %o = bf16[] parameter(0)
  ROOT %n = bf16[] parameter(1)
}

%sum (o: bf16[], n: bf16[]) -> bf16[] {
  %o = bf16[] parameter(0)
  %n = bf16[] parameter(1)
  ROOT %t = bf16[] add(%o, %n)
}

%scattered (a: bf16[64,128], p: bf16[8,64]) -> bf16[64,128] {
  %a = bf16[64,128]{1,0} parameter(0)
  %p = bf16[8,64]{1,0} parameter(1)
  ROOT %d = bf16[64,128]{1,0} scatter(%a, %i, %p), to_apply=%new
}

%added (a: bf16[64,128], p: bf16[8,64]) -> bf16[64,128] {
  %a = bf16[64,128]{1,0} parameter(0)
  %p = bf16[8,64]{1,0} parameter(1)
  ROOT %d = bf16[64,128]{1,0} scatter(%a, %i, %p), to_apply=%sum
}

%within (c: bf16[64,128], i: s32[]) -> bf16[1,128] {
  %c = bf16[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = bf16[1,128]{1,0} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={1,128}
}

%nested (x: bf16[8,64], t: bf16[64,128]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0} parameter(0)
  %t = bf16[64,128]{1,0} parameter(1)
  %row = bf16[1,128]{1,0} fusion(%t, %i), kind=kLoop, calls=%within
  ROOT %y = bf16[8,64]{1,0} add(%x, %row)
}

%same (b: bf16[64,128]) -> bf16[64,128] {
  %b = bf16[64,128]{1,0} parameter(0)
  ROOT %r = bf16[64,128]{1,0} bitcast(%b)
}

%product (x: bf16[8,64], t: bf16[64,128]) -> bf16[8,128] {
  %x = bf16[8,64]{1,0} parameter(0)
  %t = bf16[64,128]{1,0} parameter(1)
  %u = bf16[64,128]{1,0} fusion(%t), kind=kLoop, calls=%same
  ROOT %y = bf16[8,128]{1,0} convolution(%x, %u), dim_labels=bf_io->bf
}
"""


@each_row(
    ("line", "expected"),
    [
        (f"%y = bf16[8,64]{LAYOUT} add(%p, %p)", 3 * 1024),
        ("%y = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} copy(%p)", 1024),
        (f"%y = (bf16[8,64]{{1,0:S(1)}}, bf16[8,64]{LAYOUT}, u32[]{{:S(2)}}) copy-start(%p)", 1024),
        ("%y = ((bf16[64,128]{1,0}), bf16[4,128]{1,0:S(1)}, s32[]{:S(2)}) async-start(%w), calls=%c", 1024),
        ("%y = ((bf16[64,128]{1,0}), bf16[4,128]{1,0}, s32[]{:S(2)}) async-start(%w), calls=%c", 2048),
        (f"%y = bf16[8,64]{LAYOUT} copy-done(%p)", 0),
        ("%y = bf16[2,128]{1,0} gather(%w, %i), slice_sizes={1,128}", 1024),
        ("%y = bf16[64,128]{1,0} scatter(%w, %i, %p), to_apply=%r", 2 * 1024),
        # A kernel with blocks of one array in several places.
        ('%y = bf16[8,64]{1,0} custom-call(%p, %w, %w, %p), custom_call_target="tpu_custom_call"', 18 * 1024),
        # One that says how much it touches of what it updates in place, which is not more than there is.
        (f"%y = bf16[64,128]{{1,0}} {KERNEL}, {IN_PLACE}, {SAYS % 3072}", 1024 + 3072),
        (f"%y = bf16[64,128]{{1,0}} {KERNEL}, {IN_PLACE}, {SAYS % (1 << 30)}", 33 * 1024),
        (f"%y = bf16[64,128]{{1,0}} {KERNEL}, {IN_PLACE}", 33 * 1024),
        (f"%y = bf16[64,128]{{1,0}} {KERNEL}, {SAYS % 3072}", 33 * 1024),
        # Two rows are read, and written to a place that is not read.
        ("%y = bf16[8,64]{1,0} fusion(%p, %w), kind=kLoop, calls=%fused", 256 + 256),
        # What is scattered is read and written, what it is added to is read, too.
        ("%y = bf16[64,128]{1,0} fusion(%w, %p), kind=kCustom, calls=%scattered", 1024 + 1024),
        ("%y = bf16[64,128]{1,0} fusion(%w, %p), kind=kCustom, calls=%added", 1024 + 1024 + 1024),
        # A row is looked up in a fusion within the fusion.
        ("%y = bf16[8,64]{1,0} fusion(%p, %w), kind=kOutput, calls=%nested", 1024 + 256 + 1024),
        # A weight that a fusion within the fusion gives on as it is.
        ("%y = bf16[8,128]{1,0} fusion(%p, %w), kind=kOutput, calls=%product", 1024 + 64 * 128 * 2 + 2048),
    ],
)
def test_what_crosses_the_memory(line, expected):
    assert moved_bytes(module(P, W, line, more=FUSED), ()) == expected


def test_a_copy_beside_what_a_kernel_updates_in_place_is_found():
    kernel = f"%y = bf16[64,128]{{1,0}} {KERNEL}, {IN_PLACE}, {SAYS % 3072}"
    copied = "%w.1 = bf16[64,128]{1,0} copy(%w)"
    assert moved_bytes(module(P, W, kernel), ()) == 4096
    assert moved_bytes(module(P, W, copied, kernel.replace("%w", "%w.1")), ()) == 4096 + 2 * 64 * 128 * 2


def test_a_pool_is_left_out():
    line = "%y = bf16[64,128]{1,0} custom-call(%p, %w), output_to_operand_aliasing={{}: (1, {})}"
    assert moved_bytes(module(P, W, line), {64 * 128}) == 1024


def test_a_program_of_this_machine():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((48, 96), (96, 160)))
    compiled = jax.jit(lambda x, w: jnp.tanh(x @ w)).lower(x, w).compile()
    found = parse(compiled.as_text())
    assert operations(found) == {"f32": 2 * 48 * 96 * 160}
    least = 4 * (48 * 96 + 96 * 160 + 48 * 160)
    assert least <= moved_bytes(found, ()) <= least + 2 * 4 * 48 * 160


def test_layers_that_attend_with_a_kernel():
    scope = 'metadata={op_name="jit(forward)/layer_%d/jit(_run_layer)/attention/%s/pallas_call"}'
    names = [(0, "paged_attention_runs"), (0, "paged_attention_single"), (3, "paged_attention_runs"), (4, "kv_update")]
    lines = [
        f'%k{i} = f32[8]{{0}} custom-call(%p), custom_call_target="tpu_custom_call", {scope % name}'
        for i, name in enumerate(names)
    ]
    assert attending_places(module(P, *lines)) == 2
    alone = 'metadata={op_name="jit(attend)/paged_attention_decode/mpmd_map"}'
    line = f'%k = f32[8]{{0}} custom-call(%p), custom_call_target="mosaic_gpu_v2", {alone}'
    assert attending_places(module(P, line)) == 1
    assert attending_places(module(P, f'%k = f32[8]{{0}} custom-call(%p), custom_call_target="Sharding", {alone}')) == 0


def test_what_the_next_run_begins_with_is_fetched_once():
    """As libtpu 0.0.52 fetches a table of the embedding; without the second fetch the first is made in every run."""
    results = f"(bf16[64,128]{LAYOUT[:-1]}S(1)}}, bf16[64,128]{LAYOUT}, u32[]{{:S(2)}})"
    first, last = (f"%{name} = {results} copy-start(%w)" for name in "ab")
    first += ", cross_program_prefetch_index=0"
    assert moved_bytes(module(W, first, last), ()) == moved_bytes(module(W, first), ()) == 64 * 128 * 2
