"""Reading exchanges between devices out of HLO, and judging them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxengine.check.compiled.exchanges import (
    Expected,
    by_place,
    counts,
    exchanged_bytes,
    exchanges,
    gathered_inputs,
    layer_exchanges,
    scales,
    wrong,
)
from jaxengine.check.compiled.hlo import parse
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.registry import build_model
from jaxengine.sharding.layout import RAGGED, MeshLayout
from tests.fixtures.quantized_models import write

MLP = "jit(step)/shard_map/layer_1/jit(_run_layer)/mlp/down"


def found(*lines: str):
    body = "\n".join(f"  {line}" for line in lines)
    return exchanges(parse(f"HloModule m\n\nENTRY %main (p: f32[1]) -> f32[1] {{\n{body}\n}}\n"))


def at(scope: str) -> str:
    return f'metadata={{op_name="{scope}" stack_frame_id=1}}'


def test_a_pair_is_one_and_a_combined_one_is_several():
    pair = found(
        f"%a = (f32[4]{{0}}, f32[8]{{0:T(8,128)}}) all-gather-start(%x), dimensions={{0}}, {at('embed/all_gather')}",
        "%b = f32[8]{0} all-gather-done(%a)",
    )
    assert counts(pair) == {"all-gather": 1} and pair[0].elements == 8
    line = f"%c = (f32[4]{{0}}, f32[4]{{0}}) all-reduce(%y, %z), to_apply=%sum, {at(f'{MLP}/psum')}"
    both = found("%y = f32[4]{0} add(%p, %p)", "%z = f32[4]{0} add(%p, %p)", line)
    assert counts(both) == {"all-reduce": 1} and by_place(both) == {"layer 1": {"all-reduce": 2}}


def test_a_chain_of_fusions_is_one():
    chain = 'frontend_attributes={chain_id="%d"}, ' + at(f"{MLP}/all_gather")
    lines = [f"%g{i} = f32[8]{{0}} all-gather(%x), {chain % (i // 2)}" for i in range(4)]
    assert by_place(found(*lines)) == {"layer 1": {"all-gather": 2}}


def test_what_sparse_cores_exchange_is_of_who_waits_for_it():
    """XLA for tpu7x clones the first sum for all later ones, with its scope."""
    first, text = at("jit(step)/shard_map/embed/psum"), "HloModule m\n"
    for i in range(2):
        text += f"""
%called_{i} (p: f32[8]) -> f32[8] {{
  %p{i} = f32[8]{{0}} parameter(0)
  ROOT %a{i} = f32[8]{{0}} all-reduce(%p{i}), to_apply=%sum, {first}
}}, execution_thread="sparsecore"

%async_{i} (p: f32[8]) -> f32[8] {{
  %q{i} = f32[8]{{0}} parameter(0)
  ROOT %c{i} = f32[8]{{0}} custom-call(%q{i}), custom_call_target="X", called_computations={{%called_{i}}}
}}, execution_thread="sparsecore"
"""
    lines = [
        line
        for i, scope in enumerate(("jit(step)/shard_map/embed/psum", f"{MLP}/psum"))
        for line in (
            f"  %s{i} = ((), (), (s32[4]{{0}})) async-start(), calls=%async_{i}, {first}",
            f"  %u{i} = ((f32[8]{{0}}), f32[8]{{0}}, (s32[4]{{0}})) async-update(%s{i}, %x)",
            f"  %d{i} = f32[8]{{0}} async-done(%u{i}), {at(scope)}",
        )
    ]
    text += "\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n" + "\n".join(lines) + "\n}\n"
    assert by_place(exchanges(parse(text))) == {"embed": {"all-reduce": 1}, "layer 1": {"all-reduce": 1}}


def test_what_a_gpu_combines():
    """A sum of what is put together of two sums, without a scope of its own."""
    sums = [f"%x{i} = s32[1]{{0}} add(%p, %p), {at(f'step/sample/cond/{word}')}" for i, word in enumerate("ab")]
    both = found(*sums, "%c = s32[2]{0} concatenate(%x0, %x1)", "%a = s32[2]{0} all-reduce-start(%c), to_apply=%sum")
    assert by_place(both) == {"sample": {"all-reduce": 2}}


def test_a_small_reduce_scatter_of_a_tpu():
    """A sum of all that keeps one slice, without a scope of its own."""
    product = f"%y = f32[8]{{0}} add(%p, %p), {at(f'{MLP}/dot_general')}"
    summed = "%a = f32[8]{0} all-reduce(%y), to_apply=%sum"
    kept = found(product, summed, "%s = f32[4]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={4}")
    assert by_place(kept) == {"layer 1": {"reduce-scatter": 1}}
    assert by_place(found(product, summed, "%s = f32[8]{0} add(%a, %a)")) == {"layer 1": {"all-reduce": 1}}


def test_a_large_reduce_scatter_of_a_tpu():
    """As libtpu 0.0.52 writes it for eight of 64 v6e: parts are a few rows larger than they should be, and devices send
    on what is their neighbour's. The sum in it is exchanged as a reduce-scatter is."""
    text = f"""HloModule m

%all-reduce-scatter (input: bf16[4096,8]) -> bf16[528,8] {{
  %input = bf16[4096,8]{{1,0}} parameter(0)
  %pad = bf16[4224,8]{{1,0}} pad(%input, %zero), padding=0_128x0_0
  %all-reduce.1 = bf16[4224,8]{{1,0}} all-reduce(%pad), replica_groups=[2,8]<=[16], to_apply=%sum
  ROOT %own = bf16[528,8]{{1,0}} dynamic-slice(%all-reduce.1, %i, %j), dynamic_slice_sizes={{528,8}}
}}

ENTRY %main (y: bf16[4096,8]) -> bf16[512,8] {{
  %y = bf16[4096,8]{{1,0}} add(%p, %q), {at(f"{MLP}/dot_general")}
  %fusion = bf16[528,8]{{1,0}} fusion(%y), kind=kCustom, calls=%all-reduce-scatter
  %slice = bf16[112,8]{{1,0}} slice(%fusion), slice={{[416:528], [0:8]}}
  %sent = (bf16[112,8]{{1,0}}, bf16[112,8]{{1,0}}, u32[], u32[]) collective-permute-start(%slice)
  %got = bf16[112,8]{{1,0}} collective-permute-done(%sent)
}}
"""
    both = exchanges(parse(text))
    assert by_place(both) == {"layer 1": {"reduce-scatter": 1}}
    assert counts(both) == {"reduce-scatter": 1, "collective-permute": 1}
    assert [each.elements for each in both] == [4096 * 8, 112 * 8] and both[0].num_bytes == 2 * 4096 * 8
    # A permutation of anything else is nobody's part.
    other = exchanges(parse(text.replace("slice(%fusion)", "slice(%y)")))
    assert by_place(other) == {"layer 1": {"reduce-scatter": 1, "collective-permute": 1}}
    listed = text.replace("[2,8]<=[16]", "{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}")
    assert by_place(exchanges(parse(listed))) == by_place(both)


@pytest.mark.parametrize(
    "lines",
    [
        ("%sum = bf16[64,8]{1,0} all-reduce(%in)", "%own = bf16[8,8]{1,0} dynamic-slice(%in, %i, %j)"),  # of another
        ("%sum = bf16[64,8]{1,0} all-reduce(%in)", "%own = bf16[16,8]{1,0} dynamic-slice(%sum, %i, %j)"),  # too much
        ("%sum = bf16[64,8]{1,0} all-reduce(%in)", "%own = bf16[64,8]{1,0} dynamic-slice(%sum, %i, %j)"),  # all of it
        ("%sum = bf16[64,8]{1,0} all-gather(%in)", "%own = bf16[8,8]{1,0} dynamic-slice(%sum, %i, %j)"),
    ],
)
def test_a_sum_of_which_devices_keep_no_part_of_their_own_is_one(lines):
    """Eight devices add up; only the first one's result is made."""
    kind = lines[0].partition("} ")[2].partition("(")[0]
    fused = f"%y = bf16[64,8]{{1,0}} fusion(%x), kind=kCustom, calls=%fused, {at(f'{MLP}/psum')}"
    text = f"""HloModule m

%fused (p: f32[1]) -> f32[1] {{
  %in = bf16[64,8]{{1,0}} parameter(0)
  {lines[0]}, replica_groups=[1,8]<=[8]
  ROOT {lines[1]}
}}

ENTRY %main (p: f32[1]) -> f32[1] {{
  {fused}
}}
"""
    assert counts(exchanges(parse(text))) == {kind: 1}


def test_of_a_conditionals_branches_the_dearest_counts():
    """An exchange that no code wrote is found in all of them."""
    scope, text = at(f"{MLP}/cond/psum"), "HloModule m\n"
    for name, size, number in (("small", 8, 3), ("large", 64, 2), ("none", 1, 0)):
        lines = [f"  %{name}{i} = f32[{size}]{{0}} all-reduce(%p), {scope}" for i in range(number)]
        text += "\n".join(
            ["", f"%{name} (p: f32[1]) -> f32[1] {{", *lines, "  ROOT %r = f32[1]{0} parameter(0)", "}", ""]
        )
    text += f"""
ENTRY %main (p: f32[1]) -> f32[1] {{
  %a = f32[8]{{0}} all-reduce(%p), {scope}
  %c = f32[1]{{0}} conditional(%i, %p, %p, %p), branch_computations={{%small, %large, %none}}
}}
"""
    one, wanted = exchanges(parse(text)), Expected(({}, {"all-reduce": 3}), 64, 4 * 64)
    assert by_place(one) == {"layer 1": {"all-reduce": 3}} and exchanged_bytes(one) == 4 * (8 + 2 * 64)
    assert wrong(one, wanted) == []
    (nobody,) = wrong(exchanges(parse(text.replace(scope, "", 1))), wanted)
    assert nobody.startswith("no code wrote all-reduce small0")
    # One within a branch of another, and one without branches.
    nested = text.replace("%large1 =", "%d = f32[1]{0} conditional(%i, %p), branch_computations={%small}\n  %large1 =")
    assert by_place(exchanges(parse(nested.replace("={%small, ", "={%none, ")))) == {"layer 1": {"all-reduce": 6}}
    assert by_place(exchanges(parse(text.replace("{%small, %large, %none}", "{}")))) == {"layer 1": {"all-reduce": 6}}


def test_an_exchange_counts_as_what_was_written():
    """XLA:TPU sums zeros and a part instead of gathering small parts."""
    summed = found(f"%a = f32[8]{{0}} all-reduce(%x), to_apply=%sum, {at(f'{MLP}/all_gather')}")
    assert counts(summed) == {"all-reduce": 1} and by_place(summed) == {"layer 1": {"all-gather": 1}}


def test_a_ragged_exchange_where_there_is_one_and_where_there_is_none():
    rows = "%r = f32[16]{0} ragged-all-to-all(%x, %o, %a, %b, %c, /*index=5*/%d), "
    real = found(rows + at(f"{MLP}/cond/branch_1_fun/ragged_all_to_all"))
    assert by_place(real) == {"layer 1": {"ragged-all-to-all": 1}} and real[0].elements == 16
    played = found(f"%p = f32[8]{{0}} all-to-all(%x), {at(f'{MLP}/cond/branch_0_fun/ragged_all_to_all/all_to_all')}")
    assert counts(played) == {"all-to-all": 1} and by_place(played) == {"layer 1": {"ragged-all-to-all": 1}}


def test_what_layers_with_experts_exchange():
    """A layer without experts is as ever."""
    ragged = {"expert_parallel": True, "all2all_backend": RAGGED}
    experts = ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=16)
    sent = {"all-reduce": 1, "all-gather": 2, "ragged-all-to-all": 2}
    assert layer_exchanges(MeshLayout(model=4, **ragged), experts=experts) == sent
    assert layer_exchanges(MeshLayout(data=4, **ragged), experts=experts) == {"all-gather": 1, "ragged-all-to-all": 2}
    assert layer_exchanges(MeshLayout(model=4, **ragged), experts=None) == {"all-reduce": 2}
    assert layer_exchanges(MeshLayout(**ragged), experts=experts, summed=2) == {}
    assert layer_exchanges(MeshLayout(model=4), experts=None, summed=2) == {"all-reduce": 4}
    shared = replace(experts, shared_intermediate_size=16)
    assert layer_exchanges(MeshLayout(model=4, **ragged), experts=shared) == sent | {"all-reduce": 2}
    assert layer_exchanges(MeshLayout(model=4), experts=shared) == {"all-reduce": 2}
    gathered = {"all-reduce": 2, "all-gather": 3, "reduce-scatter": 1}
    assert layer_exchanges(MeshLayout(data=2, model=2, expert_parallel=True), experts=shared) == gathered
    assert layer_exchanges(MeshLayout(attn=2, model=2, expert_parallel=True), experts=shared) == gathered
    both = MeshLayout(data=2, attn=2, model=2, expert_parallel=True)
    assert layer_exchanges(both, experts=shared) == gathered | {"reduce-scatter": 2}
    assert layer_exchanges(both, experts=experts) == gathered


def test_devices_agree_on_the_scales_of_rows_that_they_split(tmp_path):
    """Those of o_proj and down_proj, whose inputs are split; static scales are every device's own."""
    numbers = {}
    for name in ("ct int channel token", "ct float tensor static"):
        folder = write(tmp_path, name)
        config = open_model(EngineConfig(model=str(folder), skip_tokenizer_init=True)).config
        (layer,) = build_model(config, Build("float32", MeshLayout(model=2))).layers
        numbers[name] = scales(layer)
    assert numbers == {"ct int channel token": 2, "ct float tensor static": 0}


def test_rows_of_codes_in_an_order_of_their_own_are_gathered(tmp_path):
    """Those of o_proj and down_proj, whose inputs are split."""
    config = open_model(
        EngineConfig(model=str(write(tmp_path, "gptq 4 v2 act-order")), skip_tokenizer_init=True)
    ).config
    for parts, sizes in ((1, []), (2, [64, 96])):
        (layer,) = build_model(config, Build("float32", MeshLayout(model=parts))).layers
        assert gathered_inputs(layer) == sizes
    assert layer_exchanges(MeshLayout(model=2), experts=None, ordered=2) == {"all-reduce": 2, "all-gather": 2}


def test_the_operand_of_a_reduce_scatter_is_the_larger_one():
    line = f"%b = f32[4]{{0}} reduce-scatter(%a), dimensions={{0}}, to_apply=%sum, {at(f'{MLP}/reduce_scatter')}"
    assert found("%a = f32[16]{0} parameter(0)", line)[0].elements == 16


def test_what_the_model_does_not_account_for():
    scope = "jit(step)/shard_map/{}"
    lines = [f"%a{i} = f32[8]{{0}} all-reduce(%x), {at(scope.format(f'layer_{i}/mlp/psum'))}" for i in range(2)]
    wanted = Expected(({"all-reduce": 1}, {"all-reduce": 1}), 8, 32)
    assert wrong(found(*lines), wanted) == []
    half = replace(wanted, exchange_bytes=16)
    assert wrong(found(*lines), half)[0] == "layer 0 exchanges 32 bytes and not at most 16"
    assert wrong(found(lines[0]), wanted) == ["layer 1 has nothing instead of 1 all-reduce"]
    gather = f"%g = f32[64,8]{{1,0}} all-gather(%w), dimensions={{0}}, {at(scope.format('layer_0/mlp/dot_general'))}"
    too_large, *other = wrong(found(*lines, gather), wanted)
    assert too_large.startswith("more than 8 elements in all-gather g f32[64,8]")
    assert other[0] == "layer 0 has 1 all-gather and 1 all-reduce instead of 1 all-reduce"
    assert other[1] == "layer 0 exchanges 2,080 bytes and not at most 33"
    (nobody,) = wrong(found(*lines, "%g = f32[8]{0} collective-permute(%x)"), wanted)
    assert nobody == "no code wrote collective-permute g f32[8]{0} in no scope"
    many = [f"%e{i} = f32[8]{{0}} all-reduce(%x), {at(scope.format('embed/psum'))}" for i in range(4)]
    assert wrong(found(*lines, *many), wanted) == ["embed has 4 all-reduce, 4 and not at most 3"]
