"""With what the suite runs each attention kernel: one in shapes that nobody serves proves nothing about those served.

Interpreted are all of them with --thorough.

Counts what the cases are said to run. Each of them fails, interpreted or on a device, unless exactly these kernels are
in its program (conformance.check_runs_kernels), so that a fallback to XLA cannot pass for a kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import jax
import pytest

from jaxengine.pallas_kernels.attention.tpu.tiles import Blocks, buffer_lanes, choose_blocks
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import TpuAttention
from tests.pallas_kernels.attention.test_paged_attention import cases_for
from tests.pallas_kernels.cases import ATTENTION, BY_NAME, PICTURES, PRODUCTION, PRODUCTION_BLOCKS
from tests.pallas_kernels.conformance import check_runs_kernels, replaced
from tests.pallas_kernels.findings import NO_TCGEN05
from tests.pallas_kernels.implementations import (
    BLACKWELL,
    BLACKWELL_ATTENTION,
    IMPLEMENTATIONS,
    MOSAIC_GPU,
    TPU_EAGER,
    TPU_PRODUCTION_LAZY,
    Implementation,
)
from tests.pallas_kernels.problems import Case
from tests.pallas_kernels.test_interpreted import VERSIONS, quick_groups, thorough_groups
from tests.pallas_kernels.worker import ROOT

GPU_KERNELS = ("paged_attention_decode", "paged_attention_merge", "paged_attention_prefill")
GPU_LATENT_KERNEL = "paged_attention_latent"
TRITON_KERNELS = ("paged_attention_rows", "paged_attention_cuts")
TPU_KERNELS = ("paged_attention_single", "paged_attention_runs")
HEAD_DIMS, PAGE_SIZES = {64, 96, 128, 192, 256}, {8, 16, 32, 64, 128, 256}
GROUPS = {1, 2, 7, 8, 16}  # query heads that share a kv head

Row = tuple[Implementation, Case, str]


def interpreted(platform: str) -> list[Row]:
    """(implementation, case, query dtype) of the attention jobs of a thorough run."""
    jobs = [job for group in thorough_groups() for job in group if job[0] == "attention"]
    rows = [(IMPLEMENTATIONS[name], BY_NAME[case], dtype) for _, name, case, dtype, *_ in jobs]
    return [(one, one.adapted(case), dtype) for one, case, dtype in rows if one.platform == platform]


def on_device(platform: Implementation) -> list[Row]:
    """The same of the suite on a device whose kernels are `platform`'s, without what they refuse."""
    device = replace(platform, name="device", interpreter=None, interpret=None, tuning=None)
    cases = [device.adapted(case) for case in cases_for(device, thorough=False)]
    rows = [(device, case, dtype) for case in cases for dtype in device.dtypes(case)]
    return [row for row in rows if device.refuses(*row[1:]) is None]


def rows_of(name: str, rows: list[Row]) -> list[Row]:
    return [(one, case, dtype) for one, case, dtype in rows if name in one.kernels(case, dtype)]


@pytest.mark.parametrize("rows", [interpreted("gpu"), on_device(MOSAIC_GPU)], ids=["interpreted", "compiled"])
def test_the_gpu_kernel_over_latents_meets_every_shape_that_is_served(rows):
    cases = [case for _, case, dtype in rows_of(GPU_LATENT_KERNEL, rows) if dtype == "bfloat16"]
    assert (576, 512) in {case.dims for case in cases}
    assert {case.heads[0] > 64 for case in cases} == {True, False}, "one tile of heads and several"
    assert {case.num_tokens > case.max_seqs for case in cases} == {True, False}, "runs and rows of one token"


@pytest.mark.parametrize("rows", [interpreted("gpu"), on_device(MOSAIC_GPU)], ids=["interpreted", "compiled"])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_gpu_kernels_meet_every_shape_that_is_served(name, rows):
    cases = [case for _, case, dtype in rows_of(name, rows) if dtype == "bfloat16"]
    assert {case.dims[0] for case in cases} >= HEAD_DIMS
    assert {case.page_size for case in cases} >= PAGE_SIZES
    assert {case.heads[0] // case.heads[1] for case in cases} >= GROUPS
    assert any(case.heads == (16, 1) for case in cases), "one kv head for all"
    assert {case.kv_dtype for case in cases} >= {None, "float8_e4m3fn"}
    assert any((case.window or 0) > 3 * 128 for case in cases), "whole blocks of 128 keys inside a window"


def test_compiled_kernels_meet_every_head_dim_with_every_page_size():
    cases = [case for _, case, dtype in rows_of(GPU_KERNELS[0], on_device(MOSAIC_GPU)) if dtype == "bfloat16"]
    crossed = Counter((case.dims[0], case.page_size) for case in cases)
    assert not [(dim, size) for dim in HEAD_DIMS for size in PAGE_SIZES if not crossed[dim, size]]


@pytest.mark.parametrize("name", TPU_KERNELS)
def test_tpu_kernels_meet_the_blocks_of_production(name):
    rows = [row for row in rows_of(name, interpreted("tpu")) if row[0].tuning.tpu_attention == TpuAttention()]
    assert {one.name for one, _, _ in rows} == {"tpu-production-lazy", "tpu-production-eager"}
    assert {case for _, case, _ in rows} >= set(PRODUCTION_BLOCKS)
    case = PRODUCTION_BLOCKS[0]
    single, group = name == "paged_attention_single", case.heads[0] // case.heads[1]
    blocks: Blocks = choose_blocks(
        TPU_PRODUCTION_LAZY.tuning.tpu_attention,
        rows=8 if single else group * 16,
        num_kv_heads=case.heads[1],
        row_bytes=buffer_lanes(case.heads[1] * sum(case.dims)) * 2,
        page_size=case.page_size,
        max_pages=case.max_pages,
        num_tiles=case.max_seqs,
        single=single,
    )
    assert (blocks.heads, blocks.pages * case.page_size) == (8, 1024 if single else 512)
    assert max(case.kv_lens) > 2 * blocks.pages * case.page_size, "a sequence of several blocks"


@pytest.mark.parametrize("platform", [MOSAIC_GPU, TPU_PRODUCTION_LAZY], ids=["gpu", "tpu"])
def test_what_kernels_leave_to_xla_is_known(platform):
    """In bfloat16, by case; every other case runs kernels."""
    left = {
        case.name for one, case, dtype in on_device(platform) if dtype == "bfloat16" and not one.kernels(case, dtype)
    }
    sloped = {case.name for case in ATTENTION if case.slopes or case.biases}
    everywhere = sloped | {case.name for case in ATTENTION if case.lookback}
    if platform.platform == "tpu":
        assert left == everywhere
        return
    assert left == {"tree chain", "tree branches"} | {case.name for case in PICTURES} | everywhere
    wide = "production 8/1 heads of 256, pages of 64, float8_e4m3fn"
    in_triton = {
        case.name
        for one, case, dtype in on_device(platform)
        if dtype == "bfloat16" and "paged_attention_rows" in one.kernels(case, dtype)
    }
    chunks = {case.name for case in ATTENTION if case.chunk is not None and not case.lookback}
    assert in_triton == {"dims (192, 128)", "page size 48", "window on both sides", "latent codes", wide} | chunks


def test_a_silent_fallback_fails():
    """What the counts stand on: a program without its kernels, and one with only some of them."""
    case = PRODUCTION[0]
    functions = {op: kernel(op, "gpu_xla") for op in ("attention_schedule", "ragged_paged_attention")}

    def without_options(*arguments, interpret, **options):
        return functions["ragged_paged_attention"](*arguments, **options)

    fallen = replaced(
        MOSAIC_GPU, attention_schedule=functions["attention_schedule"], ragged_paged_attention=without_options
    )
    with pytest.raises(AssertionError, match=r"runs \[\], not \['paged_attention_decode', "):
        check_runs_kernels(case, "bfloat16", fallen)
    decodes = replace(case, num_tokens=4, q_lens=(1, 1, 1, 1))
    check_runs_kernels(decodes, "bfloat16", MOSAIC_GPU)
    partly = replace(MOSAIC_GPU, elsewhere=lambda case, dtype: "said to be left to Triton")
    with pytest.raises(AssertionError, match=r"'paged_attention_merge'\], not \['paged_attention_cuts'"):
        check_runs_kernels(decodes, "bfloat16", partly)


def test_other_releases_of_jax_run_a_job_of_every_kernel():
    jobs = {job for group in quick_groups() for job in group}
    assert set(VERSIONS) <= jobs, f"no such jobs: {sorted(set(VERSIONS) - jobs)}"
    attention = [job for job in VERSIONS if job[0] == "attention"]
    rows = [(IMPLEMENTATIONS[name], BY_NAME[case], dtype) for _, name, case, dtype, *_ in attention]
    ran = set.union(*(one.kernels(one.adapted(case), dtype) for one, case, dtype in rows))
    assert ran == {*GPU_KERNELS, GPU_LATENT_KERNEL, *TRITON_KERNELS, *TPU_KERNELS}
    assert any(job[:2] == ("update", TPU_EAGER.name) for job in VERSIONS)
    assert any(job[0] == "hopper_product" for job in VERSIONS)


def test_blackwell_jobs_are_skipped_only_where_jax_has_no_interpreter_for_them():
    has_tcgen05 = tuple(map(int, re.findall(r"\d+", jax.__version__)[:3])) >= (0, 11, 1)
    assert (not NO_TCGEN05) == has_tcgen05, f"jax {jax.__version__}: {NO_TCGEN05 or 'Blackwell jobs run'}"


def test_a_short_run_of_ci_has_a_jax_that_runs_blackwell_jobs():
    """The newest jax, which needs Python 3.12; the run of no other release has kernels."""
    script = (ROOT / ".ci" / "run").read_text()
    rows = dict(row.split() for row in re.findall(r'"([^"]*)"', re.findall(r"^others=\((.*)\)$", script, re.M)[0]))
    pythons = [tuple(map(int, python.split("."))) for python, requirement in rows.items() if requirement == "jax"]
    assert pythons and max(pythons) >= (3, 12), f"no short run with the newest jax: {rows}"
    assert 'if [ "$1" != jax ]; then kernels=(-k "not test_interpreted and not test_mutations"); fi' in script
    on_blackwell = {job[0] for job in VERSIONS if job[1] in (BLACKWELL.name, BLACKWELL_ATTENTION.name)}
    assert on_blackwell == {"attention", "hopper_product", "hopper_grouped"}
