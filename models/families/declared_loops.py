"""Rows, like those of declared_rows, of families that run their layers several times. Their code was published with
their weights.
"""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.altup import LoopedLayers
from jaxengine.models.config.declared import AROUND, RMS, DeclaredForm
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.declared_row import GGUFRow, Row

_LLAMA: dict[str, Any] = {
    "eps": "rms_norm_eps",
    "bias": "attention_bias",
    "output_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "grouped": True,
}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
# Parts of Nanbeige's layers that no published model has: the only values of their fields.
_NANBEIGE_ONLY: dict[str, Any] = {
    **dict.fromkeys(
        (
            "qk_layernorm",
            "enable_double_loop_split",
            "loop_share_kv",
            "enable_hyper_connection",
            "enable_mhc",
            "enable_h_res_identity",
            "enable_depth_attention",
            "ngram_insert_all_layers",
        ),
        False,
    ),
    **dict.fromkeys(("emb_neighbor_num", "loop_middle_layers")),
    "insert_ngram_layer_idx": [],
}


def _ouro_loops(fields: ConfigFields) -> dict[str, LoopedLayers]:
    """Return the loop over all layers, which runs `total_ut_steps` times, 4 by default. Raises ModelConfigError for
    wrong fields, and for an `early_exit_threshold` below 1, with which logits of some tokens were those of an earlier
    loop.
    """
    if fields.number("early_exit_threshold", 1.0) < 1:
        raise fields.fail("early_exit_threshold", "at least 1: all loops run for each token")
    loops = fields.integer("total_ut_steps", 4)
    return {"loops": LoopedLayers(0, fields.integer("num_hidden_layers"), loops, normed=True)}


def _nanbeige_loops(fields: ConfigFields, layers: str = "num_hidden_layers") -> dict[str, LoopedLayers]:
    """Return the loop over all layers, which runs `num_loops` times, once by default, or, with `loop_loss_weights` of
    loops but the last, once more than there are such weights. The last norm also follows the loops before the last,
    unless `skip_loop_final_norm` is true. layers: name of the field with the number of layers. Raises ModelConfigError
    for wrong fields.
    """
    weights = fields.value("loop_loss_weights", None) or []
    if not isinstance(weights, list):
        raise fields.fail("loop_loss_weights", "a list of numbers")
    loops = len(weights) + 1 if weights else fields.integer("num_loops", 1)
    normed = not fields.boolean("skip_loop_final_norm", False)
    return {"loops": LoopedLayers(0, fields.integer(layers), loops, normed=normed)}


# Keys are the class names that config.json lists under "architectures".
LOOP_ROWS: dict[str, Row] = {
    "NanbeigeForCausalLM": Row(
        "Nanbeige 4.2 (Nanbeige 2026, arXiv:2607.22083): Llama whose layers run twice, with the last norm between.",
        DeclaredForm(norm=RMS),
        defaults={"rms_norm_eps": 1e-5, **_NO_BIAS},
        only=_NANBEIGE_ONLY,
        more=_nanbeige_loops,
        gguf=GGUFRow("nanbeige", more=lambda fields: _nanbeige_loops(fields, "block_count")),
        **_LLAMA,
    ),
    "OuroForCausalLM": Row(
        "Ouro (Zhu et al. 2025, arXiv:2510.25741): Llama with norms before and after both parts of a layer, whose "
        "layers run four times, with the last norm between.",
        DeclaredForm(
            norm=RMS,
            placement=AROUND,
            norms=("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"),
        ),
        defaults={"rms_norm_eps": 1e-6, **_NO_BIAS},
        only={"use_sliding_window": False, "early_exit_step": None},
        more=_ouro_loops,
        unused=("model.early_exit_gate.",),
        **_LLAMA,
    ),
}
