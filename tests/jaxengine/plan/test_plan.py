"""The command `jaxengine plan`: what it prints adds up, what does not fit says what to change, nothing is read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from flax import nnx

from jaxengine.check.compile import CompileRequest
from jaxengine.check.model.code import layers_with_code
from jaxengine.check.model.roofline import step_work
from jaxengine.check.targets import find_target
from jaxengine.commands.cli import main
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.plan import compiled, report
from jaxengine.plan.chips import CHIPS, Chips, read_chips
from jaxengine.plan.estimate import _tower_rows
from jaxengine.plan.model import open_planned
from jaxengine.plan.plan import LEFT, PARALLEL, Split, plan_split, platform_for
from jaxengine.plan.splits import Ranked, in_order, possible_splits
from jaxengine.runner.base.memory import StageNeeds
from jaxengine.runner.executables.layer_chain import FEW_TOKENS, num_compiled_layers
from jaxengine.scheduler.batches.buckets import Bucket
from tests.conftest import TINY_CHECKPOINT
from tests.fast_compile import as_in_production
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
GIB = 1 << 30
SMALL = ["smollm2-135m", "--max-num-seqs=8", "--max-num-batched-tokens=512"]


def planned(*words: str, status: int = 0, capsys) -> list[dict]:
    """What the command says as JSON."""
    assert main(["plan", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_plan_adds_up(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    words = [*SMALL, "--chips", "l4", "v5e:3", "--length=2048", "--price-per-hour=0.7", f"--svg={picture}"]
    card, slice_ = planned(*words, capsys=capsys)
    best = card["best"]
    assert card["fits"] and card["chips"] == "l4:1" and len(card["splits"]) == 1
    assert sum(best["parts_bytes"].values()) == best["budget_bytes"] == int(0.92 * best["device_bytes"])
    assert best["parts_bytes"]["pages"] == best["num_pages"] * best["page_bytes"]
    # 30 layers, 3 KV heads of 64 numbers, keys and values of two bytes.
    assert best["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2 == best["page_bytes"] // best["page_size"]
    assert best["sequences"] == best["num_pages"] // (2048 // 64) and best["longest"] == 8192
    assert best["parts_bytes"]["weights"] == 2 * 134_515_008
    tokens = best["decode_tokens_per_second"]
    assert best["cost_per_million_decoded"] == pytest.approx(0.7 / (tokens * 3600) * 1e6)

    # Three KV heads on three devices; whole replicas; and stages.
    sizes = {(row["tensor_parallel_size"], row["pipeline_parallel_size"]): row for row in slice_["splits"]}
    assert set(sizes) == {(3, 1), (1, 3), (1, 1)} and all(row["fits"] for row in sizes.values())
    assert slice_["best"]["decode_tokens_per_second"] >= max(row["decode_tokens_per_second"] for row in sizes.values())

    for name in ("plan-l4x1.svg", "plan-v5ex3.svg"):
        root = ElementTree.parse(tmp_path / name).getroot()
        assert root.tag.endswith("svg") and any("weights" in (text or "") for text in root.itertext())


def test_a_plan_for_people(capsys):
    assert main(["plan", *SMALL, "--chips=h100:2", "-tp", "1", "--price-per-hour=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("h100:2: fits with -")
    assert "79.11 GiB x 0.92 = 72.781 GiB\n    = 0.251 weights + " in shown and " left of the budget" in shown
    for said in (
        "estimate",
        "longest context that fits: 8,192",
        "sequences of 1,024",
        "upper bound",
        "a million tokens",
    ):
        assert said in shown


def test_a_plan_of_a_cpu_has_what_a_start_subtracts():
    """Process and heap, and the code of chains of layers: three of 30 equal ones, six in steps of few tokens."""
    model = open_planned(EngineConfig(model="smollm2-135m"), PLATFORMS["cpu"])
    plan = plan_split(model, Chips(CHIPS["cpu"], 1), Split())
    assert plan.memory is not None and plan.parts()["heap"] == plan.memory.heap > 0
    assert plan.parts()[LEFT] == plan.memory.budget - plan.memory.planned
    told = report.text(model, plan.chips, [Ranked(Split(), plan, None, None)], 1024, None)
    assert "without the machine code" in told
    kinds = [0] * 30
    assert [num_compiled_layers(kinds, tokens) for tokens in (1, FEW_TOKENS, 512)] == [6, 3, 3]
    with as_in_production():
        assert num_compiled_layers(list(range(30)), 512) == 30 and num_compiled_layers([0] * 5, 512) == 5


def test_what_does_not_fit_says_what_to_change(capsys):
    assert main(["plan", "llama-3.3-70b", "--chips", "h100"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("h100:1: does not fit") and "weights 131.42 GiB" in shown
    assert "use more devices (tensor_parallel_size, now 1" in shown and "quantization" in shown

    # Fewer bits, and no more than 128 bits a token: pages fit, but not of so long a request.
    words = ["--max-num-seqs=8", "--max-num-batched-tokens=512", "--chips=v5e"]
    (found,) = planned("llama-3.1-8b", "--quantization=int8", *words, status=1, capsys=capsys)
    assert "max_model_len is 131072; allowed: at most " in found["error"] and "lower max_model_len" in found["error"]
    longest = int(found["error"].split("at most ")[1].split()[0])
    (found,) = planned("llama-3.1-8b", "--quantization=int8", *words, f"--max-model-len={longest}", capsys=capsys)
    assert found["best"]["longest"] >= longest

    # A pool that the user fixes larger than the device.
    (found,) = planned(*SMALL, "--chips=t4", "--kv-cache-memory-bytes=20G", status=1, capsys=capsys)
    assert "lower num_gpu_blocks_override or kv_cache_memory_bytes" in found["error"]


@each_row(
    "words, said",
    [
        (["--chips=v9"], "chips is 'v9'; allowed: NAME or NAME:COUNT with one of v5e, "),
        (["--chips=l4:0"], "chips is 'l4:0'; allowed: l4:COUNT with a whole number"),
        (["--chips=l4:2", "-tp=3"], "parallel sizes whose product is 2, the devices of l4:2; given are"),
        (["--chips=l4", "-ep"], "enable_expert_parallel"),
        (["--chips=l4", "--gpu-memory-utilization=2"], "gpu_memory_utilization is 2.0"),
        (["--nnodes=2"], "nnodes is 2"),
    ],
)
def test_wrong_words_are_named(capsys, words, said):
    assert main(["plan", "smollm2-135m", *words]) == 2
    assert said in capsys.readouterr().err


def test_headers_are_read_and_no_weights():
    model = open_planned(EngineConfig(model=str(TINY_CHECKPOINT), skip_tokenizer_init=True), PLATFORMS["gpu"])
    plan = plan_split(model, Chips(CHIPS["l4"], 1), Split())
    weights = model.source.weights
    assert isinstance(weights, SafetensorsCheckpoint) and 0 < weights.bytes_read < 0.1 * model.file_bytes
    assert plan.error is None and not model.note
    model.close()


def test_a_folder_of_a_configuration_alone(tmp_path):
    (tmp_path / "config.json").write_bytes((TINY_CHECKPOINT / "config.json").read_bytes())
    model = open_planned(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True), PLATFORMS["tpu"])
    plan = plan_split(model, Chips(CHIPS["v6e"], 1), Split())
    assert plan.error is None and "there are no weights here" in model.note


@each_row(
    "count, given, experts, expected",
    [
        (1, {}, True, [(1, 1, 1, False)]),
        (2, {}, False, [(1, 1, 2, False), (1, 2, 1, False), (2, 1, 1, False)]),
        (2, {"tensor_parallel_size": 2}, True, [(2, 1, 1, False), (2, 1, 1, True)]),
        (4, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, True, [(2, 1, 2, True), (2, 2, 1, True)]),
        (4, {"pipeline_parallel_size": 4}, False, [(1, 4, 1, False)]),
        (
            8,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 2},
            False,
            [(2, 1, 2, False)],
        ),
        (6, {"tensor_parallel_size": 4}, False, []),
    ],
)
def test_splits_use_all_devices_as_the_options_say(count, given, experts, expected):
    found = possible_splits(count, given, has_experts=experts, drafts=False)
    assert [(split.tensor, split.pipeline, split.data, split.experts) for split in found] == expected


def test_speeds_that_are_nearly_equal_are_in_order_of_what_fits():
    def ranked(speed: float | None, pages: int, lacks: int | None = 0) -> Ranked:
        plan: Any = SimpleNamespace(pages_for_sequences=lambda length: pages, parts=lambda: {LEFT: -(lacks or 0)})
        error = ConfigError("a", 1, "2") if lacks != 0 else None
        bounds: Any = None if speed is None else SimpleNamespace(decode=speed)
        return Ranked(Split(), None if lacks is None else plan, bounds, error)

    # 985 is less than 2% below 1000, and 975 below 985 but not below 1000.
    best = [ranked(985, 9), ranked(1000, 5), ranked(975, 9), ranked(960, 7), ranked(None, 9)]
    best += [ranked(None, 0, 10), ranked(None, 0, 20), ranked(None, 0, None)]
    assert all(in_order(given) == best for given in (best, best[::-1], best[3:] + best[:3]))


def test_a_bound_is_bytes_over_bandwidth():
    """One sequence that decodes reads every weight but the token table once, and its keys."""
    model = open_planned(EngineConfig(model="llama-3.1-8b", max_num_seqs=1), PLATFORMS["gpu"])
    plan = plan_split(model, Chips(CHIPS["h100"], 1), Split())
    work = step_work(plan.stages[0].programs.model, Bucket(1, 1), "bfloat16", "bfloat16", 1024)
    read = plan.parts()["weights"] - 2 * 128256 * 4096
    keys = 1024 * plan.kv_bytes_per_token
    assert work.num_bytes == pytest.approx(read + keys, rel=0.001)
    assert CHIPS["h100"].bandwidth / work.num_bytes == pytest.approx(220, rel=0.01)  # 3352 GB/s over 15.2 GB


@pytest.mark.thorough("ten ways to split a model of 80 layers")
def test_the_example_of_the_documentation_is_what_the_command_prints(capsys):
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    words, shown = re.search(r"```\njaxengine (plan [^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    assert main(words.split()) == 0
    assert capsys.readouterr().out == shown


def recorded() -> dict[str, tuple]:
    """Memory plans that `jaxengine check` made with the compilers: target, settings, plan, by file and target."""
    found = {}
    for file in sorted(RESULTS.glob("check_*.json")):
        result = json.loads(file.read_text())
        for row in result.get("rows", []):
            if "plan" in row:
                plan = row["plan"] | {"programs": of_all_layers(row, result["settings"]["model"])}
                found[f"{file.stem} {row['target']}"] = row["target"], result["settings"], plan
    return found


def of_all_layers(row: dict, model: str) -> int:
    """Bytes of a plan's programs. Results of a model's first layers were scaled by the number of layers, before it was
    seen that compilers let many layers share their code."""
    whole, scaled = row["plan"]["layers"], row["plan"]["programs"]
    layers = int(model.partition(":")[2] or whole)
    if layers == whole:
        return scaled
    forward = (scaled - row["planned_held"]) * layers / (whole - layers)
    backend = "tpu" if row["target"].startswith(("v", "tpu")) else "cuda"
    share = layers_with_code(backend, whole) / layers_with_code(backend, layers)
    return int(row["planned_held"] + forward * (share - 1))


def compare(target: str, settings: dict, plan: dict) -> float:
    """The estimate of what programs take less what compilers said, as a share of the device's memory; all else of the
    plan is equal."""
    kind, _, count = target.partition("-")
    options = dict(settings["options"])
    data, pipeline = options.pop("data_parallel_size", 1), options.pop("pipeline_parallel_size", 1)
    chips = Chips(read_chips(kind).chip, int(count or 1))
    tensor = options.pop("tensor_parallel_size", chips.count // data // pipeline)
    split = Split(tensor, pipeline, data, options.pop("enable_expert_parallel", False))
    model = open_planned(EngineConfig(model=settings["model"].partition(":")[0], **options), platform_for(chips.chip))
    found = plan_split(model, chips, split)
    needs, (stage,) = found.needs[0], found.stages
    assert found.memory is not None
    assert stage.sizes(0).weights == plan["weights"] and found.memory.page_bytes == plan["page_bytes"]
    assert dict(needs.extensions).get("states", 0) == plan["states"]
    assert found.num_pages * plan["page_bytes"] >= plan["kv_pages"] - 0.012 * plan["total"]
    return (needs.programs + needs.workspace - plan["programs"] - plan["workspace"]) / plan["total"]


def _check_estimates(plans: dict[str, tuple]) -> None:
    errors = {name: compare(*each) for name, each in plans.items()}
    wrong = {name: f"{error:+.2%}" for name, error in errors.items() if not -0.003 < error < 0.008}
    assert errors and not wrong


def test_an_estimate_is_near_what_compilers_said():
    """Programs and what they need while they run are estimated within 0.8 % of a device's memory (docs/memory.md)."""
    _check_estimates({name: each for name, each in recorded().items() if "8b_int" in name or "sm_90-4" in name})


@pytest.mark.parametrize("target", ["v6e", "sm_90"])
def test_programs_of_a_whole_model_hold_what_compilers_said(target):
    """All programs of all layers of Llama 3.1 8B: many layers share their code on TPUs."""
    result = json.loads((RESULTS / f"check_llama-3.1-8b_{target}.json").read_text())
    settings, row = result["settings"], result["rows"][0]
    chips = read_chips(target)
    model = open_planned(EngineConfig(model=settings["model"], **settings["options"]), platform_for(chips.chip))
    found = plan_split(model, chips, Split()).needs[0].programs
    assert row["planned_held"] <= found <= row["planned_held"] + 0.003 * row["hbm_bytes"]


@pytest.mark.thorough("a minute: twenty large models")
def test_all_estimates_are_near_what_compilers_said():
    plans = recorded()
    assert len(plans) > 15
    _check_estimates(plans)


def test_a_towers_table_of_positions_is_no_product():
    """InternVL stores it as one row, wider than all products."""
    config = read_folder(FOLDER / "internvl_vision")
    model = nnx.eval_shape(lambda: build_model(config, Build("float32")))
    shape = SimpleNamespace(config=SimpleNamespace(dtype="float32"))
    stage: Any = SimpleNamespace(programs=SimpleNamespace(model=model, shape=shape))
    widest = 128 + 64  # of the projector: four patches joined, and an embedding
    assert _tower_rows(stage, "tower") == (4 * widest * 4, 2)


def test_a_plan_that_does_not_fit_leaves_less_than_nothing():
    model = open_planned(EngineConfig(model="llama-3.1-8b"), PLATFORMS["gpu"])
    plan = plan_split(model, Chips(CHIPS["t4"], 1), Split())
    assert isinstance(plan.error, ConfigError) and plan.parts()[LEFT] < 0 and plan.longest == 0


def test_what_weights_lack_is_named(tmp_path, capsys):
    """As the loader would name it: missing tensors, other shapes, other kinds of numbers, offsets beyond the file."""
    folder = shutil.copytree(TINY_CHECKPOINT, tmp_path / "model")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.layers.1.mlp.up_proj.weight"

    def write(changed: dict, data: bytes = content[8 + length :]) -> None:
        text = json.dumps(changed).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)

    own = header[name]
    rows, columns = own["shape"]
    kept = {key: each for key, each in header.items() if key != name}
    for changed, data, said in (
        ({}, b"", "a tensor that the model needs is missing"),
        (header | {name: own | {"shape": [columns, rows]}}, None, f"shape must be \\({rows}, {columns}\\)"),
        (header | {name: own | {"dtype": "I32"}}, None, "floating-point numbers, got int32"),
        (header | {name: own | {"dtype": "F16"}}, None, name),
        (header | {name: own | {"data_offsets": [0, 2**60]}}, None, name),
        (kept | {"model.layers.1.mlp.up.weight": own}, None, f"missing \\(at {name}"),
        (header, content[8 + length : -4], "model.safetensors"),
    ):
        write(changed, *([] if data is None else [data]))
        with pytest.raises(ModelFileError, match=said):
            open_planned(EngineConfig(model=str(folder), skip_tokenizer_init=True), PLATFORMS["cpu"])
    assert main(["plan", str(folder)]) == 2 and "model.safetensors" in capsys.readouterr().err
    write(header)
    open_planned(EngineConfig(model=str(folder), skip_tokenizer_init=True), PLATFORMS["cpu"]).close()


def test_what_another_compiler_is_asked_is_a_request(monkeypatch):
    """And what it answers are the needs of each stage."""
    asked: list[CompileRequest] = []

    def replies(request, variables, log):
        asked.append(CompileRequest(**request))
        yield {"event": "needs", "needs": [[1, 2], [3, 4]]}

    monkeypatch.setattr(compiled, "replies", replies)
    source = compiled.Elsewhere(find_target("v6e"), "llama-3.1-8b", {"dtype": "bfloat16"})
    programs = SimpleNamespace(memory=lambda further: {"of": len(further)})
    drafts = (None, SimpleNamespace(programs=None))
    stages: Any = [SimpleNamespace(programs=programs, draft=draft) for draft in drafts]
    config: Any = SimpleNamespace(**dict.fromkeys(PARALLEL, 1), max_model_len=128, attention_backend="auto")
    assert source.needs(stages, config) == [StageNeeds(1, 2, {"of": 0}), StageNeeds(3, 4, {"of": 1})]
    assert asked[0].needs_only and asked[0].kernels is None
    assert asked[0].options == {"dtype": "bfloat16", **dict.fromkeys(PARALLEL, 1), "max_model_len": 128}
    config.attention_backend = "XLA"
    with pytest.raises(ConfigError, match="attention_backend is XLA, but --compile has the kernels of v6e"):
        source.needs(stages, config)
