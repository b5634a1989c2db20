"""The accelerators' kernels without an accelerator: the same checks in jax's interpreters, races and hazards included.

Interpreters are slow: every border and feature once, with small heads, unless `--thorough` asks for everything. What
no mutant needs (test_mutations.py) and no kernel or shape is met by alone is left to it. Jobs run in two processes of
their own (conftest.py), with a time limit, because a kernel with a fault can wait for ever.
"""

from __future__ import annotations

import pytest

from tests.pallas_kernels import hopper_products, lora_products, microscaled, products, selections, triton_products
from tests.pallas_kernels.cases import (
    ATTENTION,
    CROSSED,
    LONG,
    PRODUCTION,
    PRODUCTION_BLOCKS,
    QUICK_BATCHES,
    QUICK_FEATURES,
)
from tests.pallas_kernels.checks import INVARIANTS, SLOTS
from tests.pallas_kernels.findings import FITTED_TO, IS_FITTED, NO_TCGEN05
from tests.pallas_kernels.implementations import (
    BLACKWELL,
    BLACKWELL_ATTENTION,
    INTERPRETED,
    MOSAIC_GPU,
    TPU,
    TPU_EAGER,
    TPU_FAR_LAZY,
    TPU_LAZY,
    TPU_PRODUCTION_LAZY,
    TRITON,
)
from tests.pallas_kernels.problems import FAMILIES
from tests.pallas_kernels.worker import Job

GPU_BATCHES = ("q tile straddles a kv block", "single tokens behind runs", "long runs")
# Of production a head dim that is no power of two, one of two tiles, keys in pages of few tokens, and latents.
GPU_FEATURES = (
    *(PRODUCTION[number].name for number in (0, 2, 3, 6)),
    "window 400 of 900",
    "decode bucket",
    "skewed decodes",
    "split decodes",
    "fp8 e4m3 keys and values",
)
# A program of every kind: runs, decodes, codes, wide heads, pages as long as a block.
TRITON_BATCHES = ("mixed",)
TRITON_FEATURES = (
    "codes of decodes",
    "production 4/2 heads of 256, pages of 256",
    "split decodes",
    "latent mixed",
)
GPU_LATENT = ("latent decodes", "latent of many heads")
TRITON_SELECTIONS = ("keys, mixed, with sinks", "keys of decodes, near each other", "blocks, mixed")
TPU_INDEXERS = ("indexer of keys", "indexer of blocks", "indexer of five heads")
TRITON_INDEXERS = ("indexer of few keys, in several spans", "indexer of blocks")
PRODUCTION_CASES = (PRODUCTION_BLOCKS[0].name, PRODUCTION[-1].name)
EAGER_BATCHES = ("mixed",)
# Of the quick cases of plain XLA those whose kernels the others meet as well, or that no mutant needs.
FURTHER_FEATURES = ("chunks of 400", "codes of decodes", "dims (128, 128)")
FURTHER_FEATURES += ("runs in a decode bucket", "window, sinks and soft cap")
TPU_FEATURES = tuple(name for name in QUICK_FEATURES if name not in FURTHER_FEATURES)
TPU_FEATURES += (PRODUCTION[0].name,)  # query heads of one kv head in parts
WRITES = (TPU_LAZY.name, TPU_EAGER.name)
UPDATED, MORE_DTYPES = ("bfloat16", "int8"), ("float32", "float8_e4m3fn", "float8_e5m2")
# Transfers that begin at once: where new tokens are several, in one order or another.
EAGER_SLOTS = ("scattered 40", "runs", "runs that meet")
UPDATE_SIZES = ((64, 1, 80, 80, True), (16, 2, 192, 128, False))
# What other releases of jax run: a job of each kernel, the shortest.
VERSIONS: tuple[Job, ...] = (
    ("attention", MOSAIC_GPU.name, "fp8 e4m3 keys and values", "bfloat16", "needle"),
    ("attention", MOSAIC_GPU.name, "latent decodes", "bfloat16", "needle"),
    ("attention", TRITON.name, "split decodes", "bfloat16", "needle"),
    ("attention", TPU_EAGER.name, "mixed", "bfloat16", "needle"),
    ("update", TPU_EAGER.name, "bfloat16", "runs"),
    ("hopper_product", MOSAIC_GPU.name, "pairs in groups of 32, tiles of 64"),
    ("hopper_product", MOSAIC_GPU.name, "e4m3 as it is"),
    ("hopper_grouped", MOSAIC_GPU.name, "groups of several tiles"),
    ("attention", BLACKWELL_ATTENTION.name, "mixed", "bfloat16", "needle"),
    ("hopper_grouped", BLACKWELL.name, "groups of several tiles"),
    ("hopper_product", BLACKWELL.name, "e4m3 as it is"),
    ("hopper_product", BLACKWELL.name, "pairs in groups of 32, tiles of 64"),
)
_ALWAYS: list[list[Job]] = [
    [("update_keys", TPU_LAZY.name, "bfloat16", "runs", 1, 40, 24)],
    [("determinism", TPU_LAZY.name, 2)],
]


def quick_groups() -> list[list[Job]]:
    """Jobs by implementation and program, so that those of one program follow each other in one process."""
    groups: list[list[Job]] = []
    for name, batches, features in (
        (MOSAIC_GPU.name, GPU_BATCHES, GPU_FEATURES),
        (MOSAIC_GPU.name, (), GPU_LATENT),
        (TRITON.name, TRITON_BATCHES, TRITON_FEATURES),
        (TPU_LAZY.name, QUICK_BATCHES, TPU_FEATURES),
        (TPU_EAGER.name, EAGER_BATCHES, ()),
        (TPU_FAR_LAZY.name, EAGER_BATCHES, ()),
        (TPU_PRODUCTION_LAZY.name, (), PRODUCTION_CASES),
    ):
        # Both families of values where the kernel is tried first; elsewhere the one that finds more.
        families = {(TPU_LAZY.name, QUICK_BATCHES[0]): ("uniform", "needle")}
        groups.append(
            [("attention", name, case, "bfloat16", *families.get((name, case), ("needle",))) for case in batches]
        )
        for cases in (features[: len(features) // 2], features[len(features) // 2 :]):
            groups.append([("attention", name, case, "bfloat16", "needle") for case in cases])
    groups.append([("many_parts", MOSAIC_GPU.name)])
    groups.append([("update", TPU_LAZY.name, "bfloat16", pattern) for pattern in SLOTS])
    groups.append([("update", TPU_LAZY.name, "int8", "runs")])
    groups.append([("update", TPU_EAGER.name, "bfloat16", pattern) for pattern in EAGER_SLOTS])
    groups.append([("update_sizes", TPU_LAZY.name, "bfloat16", *sizes) for sizes in UPDATE_SIZES])
    groups.append([("product", TPU_LAZY.name, name) for name in products.QUICK])
    groups.append([("grouped_product", TPU_LAZY.name, name) for name in products.QUICK_GROUPED])
    groups.append([("gated_product", TPU_LAZY.name, name) for name in products.QUICK_GATED])
    groups.append([("lora_product", TPU_LAZY.name, name) for name in lora_products.QUICK])
    groups.append([("microscaled", TPU_LAZY.name, name) for name in microscaled.QUICK])
    groups.append([("attention_to_selected", TPU_LAZY.name, name) for name in selections.QUICK])
    groups.append([("selected_by_indexer", TPU_LAZY.name, name) for name in TPU_INDEXERS])
    groups.append([("attention_to_selected", TRITON.name, name) for name in TRITON_SELECTIONS])
    groups.append([("selected_by_indexer", TRITON.name, name) for name in TRITON_INDEXERS])
    groups.append([("lora_product", MOSAIC_GPU.name, name) for name in lora_products.HOPPER_QUICK])
    groups.append([("hopper_product", MOSAIC_GPU.name, name) for name in hopper_products.QUICK])
    groups.append([("hopper_grouped", MOSAIC_GPU.name, name) for name in hopper_products.QUICK_GROUPS])
    groups.append([("hopper_gated", MOSAIC_GPU.name, name) for name in hopper_products.QUICK_GATED])
    groups.append([("triton_product", TRITON.name, name) for name in triton_products.QUICK])
    groups.append([("hopper_product", BLACKWELL.name, name) for name in hopper_products.QUICK])
    groups.append([("hopper_grouped", BLACKWELL.name, name) for name in hopper_products.QUICK_GROUPS])
    groups.append([("attention", BLACKWELL_ATTENTION.name, "mixed", "bfloat16", "needle")])  # has all of its kernels
    # What these cards run in Triton.
    groups.append([("attention", MOSAIC_GPU.name, "dims (192, 128)", "bfloat16", "needle")])
    groups.append([("attention", BLACKWELL_ATTENTION.name, "chunks of 45", "bfloat16", "needle")])
    return [group for group in groups + _ALWAYS if group]


def thorough_groups() -> list[list[Job]]:
    """Every case in every dtype and family on every implementation, but for what only its length makes special."""
    cases = [case for case in ATTENTION + CROSSED if case not in LONG]
    groups: list[list[Job]] = []
    for one in INTERPRETED:
        groups += [
            [("attention", one.name, case.name, dtype, *FAMILIES) for dtype in one.dtypes(case)] for case in cases
        ]
        groups += [[(check.__name__, one.name)] for check in INVARIANTS]
    groups += [[(check, one.name)] for one in (MOSAIC_GPU, TRITON) for check in ("splits", "many_parts")]
    groups.append([("determinism", MOSAIC_GPU.name, 2)])
    for name in WRITES:
        groups += [[("update", name, dtype, pattern) for pattern in SLOTS] for dtype in (*UPDATED, *MORE_DTYPES)]
        groups += [[("update_sizes", name, dtype, *sizes) for sizes in UPDATE_SIZES] for dtype in UPDATED]
    groups += [[("product", name, case) for case in products.PRODUCTS] for name in WRITES]
    groups += [[("grouped_product", name, case) for case in products.GROUPED] for name in WRITES]
    groups += [[("gated_product", name, case) for case in products.GATED] for name in WRITES]
    groups += [[("lora_product", name, case) for case in lora_products.PRODUCTS] for name in WRITES]
    groups += [[("microscaled", name, case) for case in microscaled.ROWS] for name in WRITES]
    for one in (*TPU, TRITON):
        groups += [[("attention_to_selected", one.name, case)] for case in selections.SELECTIONS]
        groups += [[("selected_by_indexer", one.name, case)] for case in selections.INDEXERS | selections.MORE_INDEXERS]
    on_hopper = lora_products.HOPPER | lora_products.THOROUGH
    groups += [[("lora_product", MOSAIC_GPU.name, case)] for case in on_hopper]
    for one in (MOSAIC_GPU, BLACKWELL):
        groups += [[("hopper_product", one.name, case)] for case in hopper_products.PRODUCTS]
        groups += [[("hopper_grouped", one.name, case)] for case in hopper_products.GROUPS]
    groups += [[("hopper_gated", MOSAIC_GPU.name, case)] for case in hopper_products.GATED]
    # What computes is Blackwell's own; loads, stores and merges have been through every case as Hopper's.
    of_features = (*GPU_BATCHES, *GPU_FEATURES, "codes of decodes")
    groups += [[("attention", BLACKWELL_ATTENTION.name, case, "bfloat16", "needle")] for case in of_features]
    groups.append([("triton_product", TRITON.name, case) for case in triton_products.PRODUCTS])
    return groups + _ALWAYS


def job_groups(thorough: bool) -> list[list[Job]]:
    return thorough_groups() if thorough else quick_groups()


def pytest_generate_tests(metafunc):
    groups = job_groups(metafunc.config.getoption("--thorough"))
    skip = pytest.mark.skipif(bool(NO_TCGEN05), reason=NO_TCGEN05)

    def marks(job: Job) -> list[pytest.MarkDecorator]:
        on_blackwell = job[1] in (BLACKWELL.name, BLACKWELL_ATTENTION.name)
        return [skip] * on_blackwell + [pytest.mark.versions] * (job in VERSIONS)

    rows = [
        pytest.param(index, job, id=" ".join(map(str, job)), marks=marks(job))
        for index, group in enumerate(groups)
        for job in group
    ]
    metafunc.parametrize(("group", "job"), rows)


@pytest.mark.skipif(not IS_FITTED, reason=f"the interpreters' additions are fitted to jax {', '.join(FITTED_TO)}")
@pytest.mark.timeout(900)
def test_conforms(group, job, outcomes):
    problem = outcomes[job].result()
    assert problem is None, problem
