"""NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613): BERT with rope and gated MLPs, and no biases but the norms'."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.encoder import EncoderNames, NamedEncoder, gguf_encoder_fields, rotated_fields
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

LAYER = "model.encoder.layers.{layer}"
_MASKED = "model.cls.predictions"
# Names of fields -> names in files from before transformers had the family, and the only supported values there.
_EARLIER = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
_EARLIER_ONLY = {
    "activation_function": "swiglu",
    "prenorm": False,
    "parallel_block": False,
    "causal": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "num_experts": 0,
}


class NomicBertModel(NamedEncoder):
    """Post-norm encoder with rope and gated MLPs, with a dense layer, tanh and scores of labels if it classifies."""

    gguf_architecture: ClassVar[str | None] = "nomic-bert"
    names: ClassVar[EncoderNames] = EncoderNames(
        layer=LAYER,
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        attention_norm="norm1",
        up="mlp.fc11",
        down="mlp.fc2",
        mlp_norm="norm2",
        dense="model.pooler.dense",
        labels="model.classifier",
        embedding_norm="model.emb_ln",
        masked=(f"{_MASKED}.transform.dense", f"{_MASKED}.transform.layer_norm", f"{_MASKED}.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.nomic_bert.", "model."), ("model.bert.", "model.")),
        heads=("model.pooler.", "model.cls.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = _with_present_names(fields)
        fields = fields.with_defaults(
            vocab_size=30528,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            max_position_embeddings=2048,
            layer_norm_eps=1e-12,
            rope_theta=1000.0,
            hidden_act="silu",
        )
        return rotated_fields(fields, types=2, bias=False)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_encoder_fields(gguf, activation="silu", bias=False, rotates=True)

    def make_mlp(self, build: Build) -> nnx.Module:
        size, ffn = self.config.hidden_size, self.config.intermediate_size
        gate_up = [Source(f"{LAYER}.{name}", ffn) for name in ("mlp.fc12", self.names.up)]
        down = Source(f"{LAYER}.{self.names.down}", size)
        return GatedMLP(size, ffn, source=LAYER, gate_up=gate_up, down=down, activation=self.activation, build=build)


def _with_present_names(fields: ConfigFields) -> ConfigFields:
    """Return the fields under the names of current transformers; unchanged if there is no `n_embd`. Without `n_inner`
    the intermediate size is four times the hidden size. With `max_trained_positions` the position limit is this or
    `n_positions`, whichever is less. Raises ModelConfigError for a setting that the family does not support.
    """
    if not fields.has("n_embd"):
        return fields
    fields.require(**_EARLIER_ONLY)
    if not fields.has("max_trained_positions"):  # rope is scaled beyond them alone
        fields.require(rotary_scaling_factor=None)
    named = {name: fields.value(own) for name, own in _EARLIER.items() if fields.has(own)}
    if not fields.has("n_inner"):
        named["intermediate_size"] = 4 * fields.integer("n_embd")
    if fields.has("max_trained_positions"):
        longest = fields.integer("max_trained_positions")
        named["max_position_embeddings"] = min(longest, fields.integer("n_positions", longest))
    return ConfigFields({**fields.raw, **named})
