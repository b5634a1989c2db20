"""Engines that see: what transformers recorded, out of crowds in small pools; no picture does anything to another.

What processors and towers make of pictures: tests/models/families.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxengine import LLM, BeamSearchParams, ConfigError, RequestError, SamplingParams
from tests.fixtures import picture_checkpoints
from tests.fixtures.recorded_prompts import SEGMENTED, UNITS, least_options, recorded_prompts, write_whole
from tests.tables import each_row

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "block_size": 8,
    "compilation_config": {"prefill_sizes": [], "cudagraph_capture_sizes": []},
    "disable_log_stats": True,
}
# Chunks cut pictures, and pages run out.
TIGHT = {"max_num_batched_tokens": 20, "num_gpu_blocks_override": 34}
# Pictures are not cut, and a step has room for one; half of the layers have windows.
WHOLE = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 56}
GREEDY = SamplingParams(temperature=0, max_tokens=2)
# Places in three dimensions, rows with parts for several layers, videos; and what is seen in both directions.
QUICK = ("qwen3_vl_vision", "gemma3_sees_vision")


class Case:
    """A tiny checkpoint that sees.

    Attributes:
      prompts: with their pictures, once an engine has started, and `answers`: the tokens that transformers found to
        follow, by name.
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, write_whole(name, folder)
        self.prompts: dict[str, dict[str, Any]] = {}
        self.answers = {prompt: each.answer for prompt, each in recorded_prompts(name, str).items()}

    def start(self, **options: Any) -> LLM:
        llm = LLM(str(self.folder), **{**OPTIONS, **options})
        self.write = write = llm.core.inputs.media.processor.placeholder
        self.prompts = {prompt: each.prompt for prompt, each in recorded_prompts(self.name, write).items()}
        return llm


def options_of(case: Case) -> dict[str, Any]:
    """TIGHT, or WHOLE; a model whose layers keep unlike keys needs more pages for one prompt."""
    if case.name.startswith(("gemma3", "paligemma")):
        return {**WHOLE, **least_options(case.name)}
    if case.name.startswith("molmo2"):
        return {**TIGHT, **least_options(case.name)}
    if case.name.startswith("gemma4"):  # layers whose pages differ in size
        return {**(WHOLE if "both" in case.name else TIGHT), "num_gpu_blocks_override": 76}
    if case.name.startswith("muse_glimmer"):  # a page has the keys of one layer
        return {**TIGHT, "num_gpu_blocks_override": 76}
    windowed = ("aya_vision", "cohere2", "exaone4_5_vision", "internvl_gpt_oss", "lfm3_vl")
    if case.name.startswith(windowed):  # layers with windows and without
        return {**TIGHT, "num_gpu_blocks_override": 56}
    return {**TIGHT, "num_gpu_blocks_override": 42} if case.name.startswith("llama4") else TIGHT


def answers(llm: LLM, prompts: list[Any], counts: list[int]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def check_idle(llm: LLM) -> None:
    """Nothing has been compiled, and nobody needs anything."""
    scheduler = llm.core.engine.scheduler
    assert llm.core.runner.compiles.count == 0
    assert scheduler.num_free_pages == scheduler.num_pages
    assert all(rows.num_used == 0 for rows in scheduler.extension("pictures").rows)


FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough("a further family"))
    for name in (*SEGMENTED, *UNITS)
]
OF_QWEN = [each for each in FAMILIES if str(each.values[0]).startswith("qwen")]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tight(case, executables_dir):
    return case.start(**options_of(case), compile_cache_dir=executables_dir)


def test_a_crowd_answers_as_transformers_did(case, tight):
    """Three of each prompt at once: cut, put out and taken in again; then once more, with what is known by now."""
    wanted = [*case.answers.values()] * 3
    scheduler, counts = tight.core.engine.scheduler, [len(answer) for answer in wanted]
    first = answers(tight, [*case.prompts.values()] * 3, counts)
    assert first == wanted
    rows = scheduler.extension("pictures").rows[0]
    assert rows.num_queries > rows.num_hits > 0
    check_idle(tight)
    hits = scheduler.num_prefix_hits
    assert answers(tight, [*case.prompts.values()] * 3, counts) == wanted
    assert scheduler.num_prefix_hits > hits
    check_idle(tight)


def test_pictures_of_any_size_and_their_neighbours(case, tight):
    """Each alone, then all at once with others between them; another picture makes other scores."""
    rng, write = np.random.default_rng(5), tight.core.inputs.media.processor.placeholder
    prompts: list[Any] = []
    for _ in range(12):
        height, width = rng.integers(20, 90, 2).tolist()
        coarse = rng.integers(0, 256, (-(-height // 9), -(-width // 9), 3), np.uint8)
        picture = coarse.repeat(9, axis=0).repeat(9, axis=1)[:height, :width]
        prompts.append({"prompt": f"w3 {write('image')} w5 w8", "multi_modal_data": {"image": [picture]}})
    alone = [answers(tight, [prompt], [6])[0] for prompt in prompts]
    tight.core.engine.scheduler.reset_prefix_cache()
    plain = [*case.prompts.values()]
    together = answers(tight, [each for prompt in prompts for each in (prompt, plain[0])], [6] * 24)
    assert together[::2] == alone
    scores = tight.generate(prompts, SamplingParams(max_tokens=1, temperature=0, logprobs=1), use_tqdm=False)
    best = [max(each.logprob for each in output.outputs[0].logprobs[0].values()) for output in scores]
    assert len({round(score, 4) for score in best}) > 6
    check_idle(tight)


def test_a_picture_seen_before_is_not_encoded_again(case, tight):
    prompt = next(each for each in case.prompts.values() if each["multi_modal_data"].get("image"))
    rows = tight.core.engine.scheduler.extension("pictures").rows[0]
    tight.core.engine.scheduler.reset_prefix_cache()
    answers(tight, [prompt], [2])
    for reset in (False, True):
        if reset:
            tight.core.engine.scheduler.reset_prefix_cache()
        before = rows.num_queries - rows.num_hits
        answers(tight, [prompt], [2])
        assert rows.num_queries - rows.num_hits == before


@pytest.mark.parametrize("case", OF_QWEN, indirect=True)
def test_the_processor_is_told_of_one_prompt(case, tight):
    """What it is told, Qwen's bounds of pixels, makes other embeddings of the same picture; what is larger than any is
    refused before its pixels are made."""
    llm = tight
    write, picture = llm.core.inputs.media.processor.placeholder, picture_checkpoints.picture(3, 24, 40)
    prompt = {"prompt": write("image"), "multi_modal_data": {"image": [picture]}}
    small = {**prompt, "mm_processor_kwargs": {"min_pixels": 64, "max_pixels": 256}}
    rows = llm.core.engine.scheduler.extension("pictures").rows[0]
    before = rows.num_queries - rows.num_hits
    lengths = [len(each.prompt_token_ids) for each in llm.generate([small, prompt, small], GREEDY, use_tqdm=False)]
    assert lengths[0] == lengths[2] < lengths[1] and rows.num_queries - rows.num_hits <= before + 2
    message = [{"role": "user", "content": [{"type": "image", "image": picture}]}]
    options = {"use_tqdm": False, "chat_template": "{% for message in messages %}" + write("image") + "{% endfor %}"}
    told = llm.chat(message, GREEDY, mm_processor_kwargs=small["mm_processor_kwargs"], **options)
    assert len(told[0].prompt_token_ids) == lengths[0]
    tracemalloc.start()
    with pytest.raises(RequestError, match=r"makes \d+ patches of pixels; at most \d+ are possible"):
        llm.generate({**prompt, "mm_processor_kwargs": {"min_pixels": 1 << 26, "max_pixels": 1 << 28}}, use_tqdm=False)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    check_idle(llm)


def embedded(case: Case, llm: LLM) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Prompts with what the tower made of their pictures in the place of these, as far as a family takes it, and their
    answers. Nothing of it is kept."""
    (pool,) = llm.core.engine.scheduler.extension("pictures").rows
    processor = llm.core.inputs.media.processor
    grids = any(kind.__name__ == "GridProcessor" for kind in type(processor).__mro__)
    grids &= not hasattr(processor.tower, "num_queries")  # whose crops have as many rows, whatever their shape
    grids |= case.name.startswith("molmo")
    most = np.inf if grids else getattr(processor, "most_given", 1)  # squares of one picture
    unit = processor.tower.unit
    made = {
        name: [processor.process("image", each, {}) for each in prompt["multi_modal_data"].get("image", ())]
        for name, prompt in case.prompts.items()
    }
    crops = getattr(processor, "crop_grids", lambda item: [item])  # nothing says how rows of several are cut
    names = [
        name
        for name, items in made.items()
        if all(len(item.patches) <= most * unit and len(crops(item)) == 1 for item in items)
    ]
    given = []
    for prompt in (case.prompts[name] for name in names):
        rows, images = [], prompt["multi_modal_data"].get("image", [])
        among = getattr(processor, "among", lambda options, _: options)
        options = dict(among({}, {"image": len(images)}))
        for picture in images:
            item = processor.process("image", picture, options)
            llm.reset_mm_cache()
            llm.reset_prefix_cache()
            alone = {"prompt": case.write("image"), "multi_modal_data": {"image": [picture]}}
            answers(llm, [alone | {"mm_processor_kwargs": options}], [1])
            ((_, kept),) = pool._rows.items()
            values = np.asarray(llm.core.runner.stages[0].extensions["pictures"].rows, np.float32)[kept]
            rows.append({"image_embeds": values, "image_grid_thw": list(item.grid)} if grids else values)
        given.append({**prompt, "multi_modal_data": {**prompt["multi_modal_data"], "image": rows}})
    llm.reset_mm_cache()
    llm.core.engine.scheduler.reset_prefix_cache()
    return given, [case.answers[name] for name in names]


@pytest.mark.thorough("a further family", but=QUICK[:1])
def test_embeddings_in_the_place_of_pictures(case, executables_dir):
    """What the tower made of pictures, given as such: the same answers, and nothing encoded."""
    llm = case.start(**options_of(case), compile_cache_dir=executables_dir, enable_mm_embeds=True)
    processor, (given, wanted) = llm.core.inputs.media.processor, embedded(case, llm)
    stats = llm.core.engine.extensions.media_stats()
    before, videos = stats.num_calls, sum(len(each["multi_modal_data"].get("video", ())) for each in given)
    assert answers(llm, given * 2, [len(each) for each in wanted] * 2) == wanted * 2
    assert stats.num_calls - before <= 2 * videos
    size, write = processor.tower.num_parts * llm.core.inputs.model_config.hidden_size, case.write("image")
    for wrong, text in (
        (np.zeros((4, size + 1), np.float32), f"{size + 1} numbers each; allowed: {size}"),
        (np.full((4, size), np.nan, np.float32), "not finite"),
        (
            {"image_embeds": np.zeros((7, size), np.float32), "image_grid_thw": [1, 2, 7]},
            "grid|embeddings of an image",
        ),
        (np.zeros((400, size), np.float32), "embeddings|grid"),
    ):
        with pytest.raises(RequestError, match=text):
            llm.generate({"prompt": write, "multi_modal_data": {"image": wrong}}, use_tqdm=False)
    check_idle(llm)


def test_requests_that_leave_leave_nothing(case, tight):
    core = tight.core
    for steps in range(5):
        prepared = [core.inputs.prepare(prompt, SamplingParams(max_tokens=8)) for prompt in case.prompts.values()]
        for each in prepared:
            core.add(each)
        for _ in range(steps):
            core.step()
        for each in prepared:
            core.abort(each.request_id)
        while core.has_unfinished:
            core.step()
        check_idle(tight)


def test_what_is_refused(case, tight):
    picture = np.zeros((20, 20, 3), np.uint8)
    write = tight.core.inputs.media.processor.placeholder
    # BLIP-2 and Molmo have images without a placeholder before the prompt.
    alone = {"prompt": "w1", "multi_modal_data": {"image": [picture]}}
    for prompt, text in (
        *([] if case.name.startswith(("blip2", "molmo_")) else [(alone, "image")]),
        ({"prompt": write("image"), "multi_modal_data": {"image": [picture] * 2}}, "image"),
        ({"prompt": write("image"), "multi_modal_data": {"sound": [picture]}}, "sound"),
        ({"prompt": write("image"), "multi_modal_data": [picture]}, "multi_modal_data"),
        ({"prompt": write("image"), "multi_modal_data": {"image": "hello"}}, "image"),
        ({"prompt": write("image"), "multi_modal_data": {"image": np.zeros((4, 8), np.float32)}}, "enable_mm_embeds"),
        (
            {"prompt": write("image"), "multi_modal_data": {"image": picture}, "mm_processor_kwargs": {"colour": 1}},
            "colour",
        ),
        ({"prompt": write("image"), "multi_modal_data": {"image": picture}, "mm_processor_kwargs": 3}, "kwargs"),
        (
            {
                "prompt": write("image"),
                "multi_modal_data": {"image": picture},
                "mm_processor_kwargs": {"a": "b" * 17000},
            },
            "mm_processor_kwargs is longer than",
        ),
        (
            {"prompt": write("image") * 300, "multi_modal_data": {"image": [picture] * 300}},
            "more embeddings than max_model_len has room for; allowed: 255",
        ),
    ):
        with pytest.raises(RequestError, match=text):
            tight.generate(prompt, use_tqdm=False)
    prompt = {"prompt": write("image"), "multi_modal_data": {"image": picture}}
    if tight.core.inputs.media.processor.tower.whole_prompt:
        long = {**prompt, "prompt": write("image") + " w3" * 60}
        with pytest.raises(RequestError, match=r"computes a prompt with images at once: .* \d\d tokens, got \d\d"):
            tight.generate(long, use_tqdm=False)
        with pytest.MonkeyPatch.context() as patch:
            media = tight.core.inputs.media
            patch.setattr(media, "_config", dataclasses.replace(media._config, num_encoder_rows=1))
            with pytest.raises(RequestError, match="needs all images of a prompt at once: .* raise encoder_cache_size"):
                tight.generate(prompt, use_tqdm=False)
    with pytest.raises(RequestError, match="beam search"):
        tight.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
    check_idle(tight)


def step_of_text(llm: LLM) -> tuple[dict[str, int], str]:
    """Of steps without pictures: how many numbers each is told, and the smallest one as it is given to XLA."""
    runner, (stage,) = llm.core.runner, llm.core.runner.stages
    buckets = [bucket for bucket in runner.buckets if not bucket.sections]
    program = stage.programs.forward(min(buckets), stage.params, stage.programs.kv_shapes(8))
    lowered = jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments)
    return {str(bucket): runner.packer.layouts[bucket].size for bucket in buckets}, lowered.as_text()


@pytest.mark.thorough("a further family", but=QUICK[1:])
def test_a_model_that_is_not_to_see(case, tight, executables_dir):
    """It has no tower then, and no programs for pictures; steps of text are the same in a model that does."""
    says = {"language_model_only": True, "limit_mm_per_prompt": {"image": 2}, "compile_cache_dir": executables_dir}
    llm = LLM(str(case.folder), **{**OPTIONS, **options_of(case), **says})
    (sizes, program), (own_sizes, own_program) = step_of_text(llm), step_of_text(tight)
    assert sizes == own_sizes
    # With places in three dimensions a slot has the distance of its text behind its pictures.
    assert (program == own_program) != tight.core.runner.extension("pictures").uses_mrope
    assert llm.core.inputs.media is None and "pictures" not in llm.core.runner.extensions
    assert not any(
        bucket.sections for bucket in llm.core.runner.buckets
    ) and not llm.core.runner.plan.extensions.keys() - {"states"}
    with pytest.raises(RequestError, match="language_model_only"):
        llm.generate({"prompt": "w1", "multi_modal_data": {"image": np.zeros((20, 20, 3), np.uint8)}}, use_tqdm=False)
    name = next(name for name, each in case.prompts.items() if not any(each["multi_modal_data"].values()))
    assert answers(llm, [case.prompts[name]["prompt"]], [4]) == [case.answers[name][:4]]


@each_row(
    ("options", "named"),
    [
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, "enable_chunked_prefill"),
        ({"mm_encoder_tp_mode": "pictures"}, "mm_encoder_tp_mode"),
        ({"max_num_batched_encoder_tokens": 0}, "max_num_batched_encoder_tokens"),
        ({"disable_chunked_mm_input": True, "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
    ],
)
def test_options_that_do_not_fit(case, options, named):
    with pytest.raises(ConfigError, match=named):
        LLM(str(case.folder), **{**OPTIONS, **WHOLE, **options})
