"""Tower of sounds of Nemotron-H Omni (NVIDIA 2026): Parakeet's Fast Conformer over each clip of 30 seconds, and
an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.sound.fast_conformer import STRIDE, ConformerConfig, FastConformer, conformer_fields
from jaxengine.models.vision.base.vit import linear

# Prefixes in the model's names of tensors, as transformers has them.
TOWER, PROJECTOR = "audio_tower", "embed_audio"
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "conv_kernel_size": 9,
    "subsampling_conv_channels": 256,
    "num_mel_bins": 80,
}
# Parts of transformers' names -> those of NeMo's.
PARTS = (
    *((f".self_attn.{name}_proj.", f".self_attn.linear_{name}.") for name in "qkv"),
    (".self_attn.o_proj.", ".self_attn.linear_out."),
    (".self_attn.relative_k_proj.", ".self_attn.linear_pos."),
    *((f".self_attn.bias_{name}", f".self_attn.pos_bias_{name}") for name in "uv"),
    (".conv.norm.", ".conv.batch_norm."),
    (".subsampling.layers.", ".pre_encode.conv."),
    (".subsampling.linear.", ".pre_encode.out."),
)
_CLIP = 3000  # frames
_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class NemotronSoundConfig(ConformerConfig):
    """Sizes of the tower. A unit is one clip. Its column "sound" is 0 for frames of the sound, and -1 for the silence
    after it.

    Attributes:
      projector_size, projector_bias, projector_eps: inner elements of the MLP, whether its products have biases, and
        epsilon of the norm before it.
    """

    projector_size: int
    projector_bias: bool
    projector_eps: float

    @property
    def unused(self) -> tuple[str, ...]:
        """Biases of convolutions, which files have that say there are none."""
        names = () if self.convolution_bias else ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")
        return tuple(f"{TOWER}.layers.{layer}.conv.{name}.bias" for layer in range(self.num_layers) for name in names)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return NemotronSoundTower(self, hidden_size, build)


def read_nemotron_sound(fields: ConfigFields) -> NemotronSoundConfig:
    """Return the tower's configuration from the `audio_config` of a config.json, with transformers' defaults for absent
    fields: conformer_fields', `projection_hidden_size`, `projection_bias` and `projection_eps`. Raises ModelConfigError
    for wrong fields, and for sizes that do not fit each other.
    """
    audio = fields.part("audio_config", **_DEFAULTS)
    return NemotronSoundConfig(
        **conformer_fields(audio, bias=False),
        columns=("sound",),
        merge=STRIDE,
        unit=_CLIP,
        hears=True,
        projector_size=audio.integer("projection_hidden_size"),
        projector_bias=audio.boolean("projection_bias", False),
        projector_eps=audio.number("projection_eps", _EPS),
    )


class NemotronSoundTower(FastConformer):
    """Tower of sounds of Nemotron-H Omni.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: NemotronSoundConfig, hidden_size: int, build: Build):
        super().__init__(config, TOWER, build)
        size, inner, bias = config.hidden_size, config.projector_size, config.projector_bias
        self.norm = RMSNorm(size, config.projector_eps, source=f"{PROJECTOR}.layer_norm", build=build)
        self.up = linear(size, f"{PROJECTOR}.linear_1", inner, ("embed", "ffn"), build, bias=bias)
        self.down = linear(inner, f"{PROJECTOR}.linear_2", hidden_size, ("ffn", "embed"), build, bias=bias)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        lengths = (columns[0].reshape(-1, self.config.unit) >= 0).sum(axis=1)
        x = self.encoded(patches, lengths)
        with jax.named_scope("projector"):
            inner = ACTIVATIONS["relu2"](self.up(self.norm(x), out_dtype=jnp.float32))
            return self.down(inner.astype(x.dtype))
