"""Families that a user registers: what is refused, and that a registered one is opened and served."""

from __future__ import annotations

import json
import shutil
from typing import Any, ClassVar

import pytest

from jaxengine import LLM, ConfigError, SamplingParams, register_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.model_classes import MODELS
from jaxengine.runner.start.open import open_resolved


class OwnForCausalLM(LlamaForCausalLM):
    """Llama, halved: its logits are not those of Llama, and greedy tokens are the same."""

    gguf_architecture: ClassVar[str | None] = None

    def logits(self, hidden: Any) -> Any:
        return super().logits(hidden) / 2


@pytest.fixture(autouse=True)
def _forget():
    yield
    MODELS.pop("OwnForCausalLM", None)


def renamed(**members: Any) -> type:
    return type("OwnForCausalLM", (LlamaForCausalLM,), members)


@pytest.mark.parametrize(
    ("architecture", "model_class", "sentence"),
    [
        ("OwnForCausalLM", OwnForCausalLM.__init__, "model_class is .*; allowed: a class$"),
        (
            "OwnForCausalLM",
            dict,
            "model_class is 'dict'; allowed: a CausalLM; it lacks __call__, cache_groups, checkpoint_names, ",
        ),
        ("Another", OwnForCausalLM, "architecture is 'Another'; allowed: the name of its class, 'OwnForCausalLM'$"),
        (
            "LlamaForCausalLM",
            type("LlamaForCausalLM", (OwnForCausalLM,), {}),
            "architecture is 'LlamaForCausalLM'; allowed: a name that is free; "
            "jaxengine.models.families.llama has this one$",
        ),
        (
            "OwnForCausalLM",
            renamed(gguf_architecture="llama"),
            "gguf_architecture is 'llama'; allowed: None, or a name that is free; LlamaForCausalLM reads these files$",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused_and_changes_nothing(architecture, model_class, sentence):
    before = dict(MODELS)
    with pytest.raises(ConfigError, match=sentence):
        register_model(architecture, model_class)
    assert before == MODELS


def test_ones_own_class_may_be_made_again_but_not_another_modules():
    register_model("OwnForCausalLM", OwnForCausalLM)
    again = renamed(__module__=OwnForCausalLM.__module__)
    register_model("OwnForCausalLM", again)
    assert MODELS["OwnForCausalLM"] is again
    with pytest.raises(ConfigError, match=f"{__name__.replace('.', '[.]')} has this one"):
        register_model("OwnForCausalLM", renamed(__module__="elsewhere"))


def test_a_registered_class_serves_its_checkpoints_and_leaves_no_program_behind(make_llm, tiny_options, tmp_path):
    """No stored program: its key counts our sources, and would not change with the user's."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_options["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    options = {**tiny_options, "model": str(folder), "compile_cache_dir": str(tmp_path / "programs")}
    options["compilation_config"] = {"cudagraph_capture_sizes": [8], "prefill_sizes": [32]}
    with pytest.raises(ValueError, match="'OwnForCausalLM' is not supported; .*register_model"):
        LLM(**options)
    register_model("OwnForCausalLM", OwnForCausalLM)
    assert open_resolved(EngineConfig(**options)).config.compile_cache_dir == ""  # as workers of several hosts open it
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    own, plain = LLM(**options), make_llm()
    (ours,), (theirs,) = (llm.generate(prompt, params, use_tqdm=False) for llm in (own, plain))
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    scores = [[next(iter(each.values())).logprob for each in out.outputs[0].logprobs or ()] for out in (ours, theirs)]
    assert all(half < whole for half, whole in zip(*scores, strict=True)), scores
    assert not (tmp_path / "programs").exists()
