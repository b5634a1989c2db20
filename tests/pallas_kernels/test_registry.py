"""Every row of the registry runs under the conformance suite; a row that no test runs is an error."""

from __future__ import annotations

from jaxengine.pallas_kernels.registry import KERNELS, kernel
from tests.pallas_kernels.attention.test_native import IMPLEMENTATIONS as NATIVE_ATTENTION
from tests.pallas_kernels.attention.test_selected import IMPLEMENTATIONS as SELECTED
from tests.pallas_kernels.attention.test_selected_blocks import IMPLEMENTATIONS as SELECTED_BLOCKS
from tests.pallas_kernels.attention.test_whole_prompts import IMPLEMENTATIONS as WHOLE_PROMPTS
from tests.pallas_kernels.implementations import IMPLEMENTATIONS, IN_PROCESS
from tests.pallas_kernels.matmul.test_dense import IMPLEMENTATIONS as DENSE
from tests.pallas_kernels.matmul.test_grouped import IMPLEMENTATIONS as GROUPED
from tests.pallas_kernels.matmul.test_lora import IMPLEMENTATIONS as LORA
from tests.pallas_kernels.matmul.test_microscaled import IMPLEMENTATIONS as MICROSCALED
from tests.pallas_kernels.matmul.test_native import IMPLEMENTATIONS as NATIVE
from tests.pallas_kernels.matmul.test_quantized import IMPLEMENTATIONS as QUANTIZED
from tests.pallas_kernels.matmul.test_quantized_table import IMPLEMENTATIONS as TABLES
from tests.pallas_kernels.state.test_conv import IMPLEMENTATIONS as CONV
from tests.pallas_kernels.state.test_delta import IMPLEMENTATIONS as DELTA
from tests.pallas_kernels.state.test_scan import IMPLEMENTATIONS as SCAN
from tests.pallas_kernels.state.test_space import IMPLEMENTATIONS as SPACE
from tests.pallas_kernels.test_interpreted import quick_groups
from tests.tables import each_row

# Check -> the operations it compares with the oracle.
CHECKED = {
    "attention": ("attention_schedule", "ragged_paged_attention"),
    "update": ("kv_update_schedule", "kv_cache_update"),
    "product": ("quantized_matmul",),
    "hopper_product": ("quantized_matmul",),
    "triton_product": ("quantized_matmul",),
    "hopper_grouped": ("grouped_matmul", "quantized_grouped_matmul"),
    "hopper_gated": ("gated_matmul", "quantized_gated_matmul"),
    "grouped_product": ("grouped_matmul", "quantized_grouped_matmul"),
    "gated_product": ("gated_matmul", "quantized_gated_matmul"),
    "lora_product": ("lora_product",),
    "microscaled": ("microscaled_rows",),
    "attention_to_selected": ("selected_attention", "block_attention"),
    "selected_by_indexer": ("select_keys", "select_blocks"),
}


def run_by_tests() -> set:
    """The functions that attention and update checks run, here or in an interpreter, and those of products and
    of states."""
    jobs = {(job[0], job[1]) for group in quick_groups() for job in group}
    jobs |= {(check, implementation.name) for implementation in IN_PROCESS for check in CHECKED}
    ops = ((op, IMPLEMENTATIONS[name].platform) for check, name in jobs for op in CHECKED.get(check, ()))
    states = {*CONV, *DELTA, *SCAN, *SPACE}
    return (
        {kernel(*row) for row in ops if row in KERNELS}
        | WHOLE_PROMPTS
        | SELECTED
        | SELECTED_BLOCKS
        | set(GROUPED)
        | set(DENSE)
        | set(QUANTIZED)
        | set(TABLES)
        | set(LORA)
        | MICROSCALED
        | NATIVE
        | NATIVE_ATTENTION
        | states
    )


@each_row("row", KERNELS)
def test_every_row_is_under_conformance(row):
    assert kernel(*row) in run_by_tests(), f"{row} is a row of the registry that no conformance case runs"


def test_every_implementation_is_a_row():
    platforms = {implementation.platform for implementation in IMPLEMENTATIONS.values()}
    assert platforms == {platform for _, platform in KERNELS}
