"""The adapter that Phi-4-multimodal has for prompts with images, in its checkpoint's folder vision-lora."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, LoRARequest, SamplingParams
from jaxengine.engine.extensions.adapters import Adapters
from jaxengine.scheduler.base.media import EMBEDS
from tests.fixtures.drawn_weights import draw_all
from tests.jaxengine.engine.test_pictures import OPTIONS, Case

RANK, ALPHA = 4, 6
# Modules that an adapter changes, inputs and outputs of each; and what the published config.json says of them.
MODULES = {
    "self_attn.qkv_proj": (64, 128),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_up_proj": (64, 160),
    "mlp.down_proj": (80, 64),
}
PATTERN = r"layers.*((self_attn\.(qkv_proj|o_proj))|(mlp\.(gate_up|down)_proj))"


def drawn() -> dict[str, np.ndarray]:
    """The tensors of an adapter of both layers."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(2):
        for module, (inner, outer) in MODULES.items():
            source = f"base_model.model.model.layers.{layer}.{module}"
            shapes |= {f"{source}.lora_A.weight": (RANK, inner), f"{source}.lora_B.weight": (outer, RANK)}
    return draw_all(shapes)


def write_adapter(folder):
    folder.mkdir()
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": PATTERN}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(drawn(), folder / "adapter_model.safetensors")


def merge(folder):
    """Add the adapter to the checkpoint's own weights."""
    tensors, adapter = load_file(folder / "model.safetensors"), drawn()
    for name in (name for name in adapter if "lora_A" in name):
        change = ALPHA / RANK * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        tensors[name.removeprefix("base_model.model.").replace("lora_A.", "")] += change
    save_file(tensors, folder / "model.safetensors")


def test_only_items_that_a_tower_encodes_ask_for_it():
    adapters: Any = Adapters.__new__(Adapters)
    adapters.store, adapters._of_media = SimpleNamespace(find=lambda request: None), (own := object())
    for kinds, lora, expected in (
        ([EMBEDS], None, None),  # of prompt_embeds, which may stand for text
        (["image"], None, own),
        ([EMBEDS, "audio"], None, own),
        (["image"], "named", None),  # the store sets it
        (None, None, None),
    ):
        media = None if kinds is None else SimpleNamespace(items=[SimpleNamespace(modality=kind) for kind in kinds])
        adapters.prepare(request := SimpleNamespace(lora=lora, media=media, adapter=None))
        assert request.adapter is expected, kinds


@pytest.mark.thorough("starts two engines; test_granite_speech.py has the same of sounds")
def test_prompts_with_images_run_with_the_models_adapter(tmp_path, executables_dir):
    """As if it were a part of the weights, unless a request names another; prompts of text run without it."""
    name, options = "phi4_multimodal_vision", OPTIONS | {"compile_cache_dir": executables_dir}
    merged, case = (Case(name, tmp_path / each) for each in ("merged", "own"))
    merge(merged.folder)
    write_adapter(case.folder / "vision-lora")
    write_adapter(tmp_path / "named")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def answers(llm: LLM, prompts, **more) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False, **more)]

    wanted = answers(merged.start(**options), list(merged.prompts.values()))
    llm = case.start(**options)
    assert (llm.core.config.enable_lora, llm.core.config.max_lora_rank) == (True, 8)
    plain = [answer[:6] for answer in case.answers.values()]
    assert answers(llm, list(case.prompts.values())) == [plain[0], *wanted[1:]] and wanted != plain
    named = LoRARequest("named", 1, str(tmp_path / "named"))
    assert answers(llm, list(case.prompts.values()), lora_request=named) == wanted
