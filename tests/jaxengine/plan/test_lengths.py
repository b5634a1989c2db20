"""max_model_len "auto" is the longest that fits, at start and in a plan; compiled needs are those of a start."""

from __future__ import annotations

import pytest

from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.plan.chips import CHIPS, Chips
from jaxengine.plan.compiled import OnCpu
from jaxengine.plan.model import open_planned
from jaxengine.plan.plan import Split, plan_split
from jaxengine.runner.base.memory import TooLong, longest_fit
from jaxengine.runner.start.devices import plan_shapes
from jaxengine.runner.start.open import open_resolved
from jaxengine.scheduler.pages.groups import most_pages_of
from tests.tables import each_row

CPU = Chips(CHIPS["cpu"], 1)


def planned(options: dict, **how):
    return plan_split(open_planned(EngineConfig(**options), PLATFORMS["cpu"]), CPU, Split(), **how)


def test_the_longest_that_fits_is_taken(tiny_options):
    """Nine pages of four tokens; one more does not fit."""
    options = {**tiny_options, "num_gpu_blocks_override": 9}
    opened = open_resolved(EngineConfig.from_options(**options | {"max_model_len": "auto"}))
    assert opened.config.max_model_len == 36 and opened.config.fixes_pages
    assert planned(options | {"max_model_len": -1}).config.max_model_len == 36
    assert plan_shapes(*opened[:4]).num_pages == 9
    for length, fits in ((36, True), (37, False)):
        own = open_resolved(EngineConfig(**options | {"max_model_len": length}))
        if fits:
            plan_shapes(*own[:4])
        else:
            with pytest.raises(TooLong, match="max_model_len is 37; allowed: at most 36"):
                plan_shapes(*own[:4])


def test_a_model_that_fits_keeps_its_context(tiny_options):
    options = {**tiny_options, "max_model_len": "auto"}
    assert open_resolved(EngineConfig(**options)).config.max_model_len == 256 == planned(options).config.max_model_len


def test_a_length_of_chips_is_the_longest_that_fits():
    """Planned with one page more, the same model does not fit."""
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "quantization": "int8"}

    def on_a_chip(length):
        config = EngineConfig(model="llama-3.1-8b", max_model_len=length, **small)
        return plan_split(open_planned(config, PLATFORMS["tpu"]), Chips(CHIPS["v5e"], 1), Split())

    plan = on_a_chip("auto")
    found = plan.config.max_model_len
    assert plan.error is None and 8192 < found < 131072 and plan.longest - found < 4 * 128
    longer = on_a_chip(plan.longest + 4 * 128)
    assert isinstance(longer.error, ConfigError) and "lower max_model_len" in str(longer.error)


@each_row(
    "options, said",
    [
        ({"max_model_len": "longest"}, "max_model_len"),
        ({"max_model_len": -2}, "max_model_len is -2; allowed: 2 to "),
        ({"max_model_len": "auto", "nnodes": 2}, "max_model_len is 'auto'; allowed: a number with nnodes 2"),
    ],
)
def test_other_words_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)


def test_the_word_is_minus_one():
    assert EngineConfig(max_model_len="auto").max_model_len == AUTO_LENGTH == -1


@each_row("windows", [(None,), (16,), (None, 16), (40, 16)])
def test_the_longest_of_some_pages_is_that_of_counting(windows):
    """Against trying every length."""
    config = planned({"model": "smollm2-135m", "max_num_batched_tokens": 64, "num_gpu_blocks_override": 2000}).config
    limits = config.scheduler_config(1, windows=windows)
    for num_pages in (0, 1, 2, 5, 9, 17, 40):
        lengths = [tokens for tokens in range(0, 801, 16) if tokens == 0 or most_pages_of(limits, tokens) <= num_pages]
        assert longest_fit(config, num_pages, windows, 800) == max(lengths)


@pytest.mark.thorough("test_against_start.py compares whole plans")
def test_compiled_needs_are_those_of_a_start(make_llm, tiny_options):
    (stage,) = make_llm().core.engine.runner.stages
    wanted = stage.estimate_needs()
    plan = planned({**tiny_options, "num_gpu_blocks_override": None}, compiled=OnCpu(CPU))
    assert plan.error is None and not plan.estimated
    (needs,) = plan.needs
    assert (needs.workspace, dict(needs.extensions)) == (wanted.workspace, dict(wanted.extensions))
    assert needs.programs == pytest.approx(wanted.programs, rel=1e-3)  # a file's size, with layouts or without
