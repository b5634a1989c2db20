"""Vision tower of Idefics2 (Laurençon et al. 2024, arXiv:2405.02246): SigLIP over images of any shape, an MLP, and a
perceiver, whose latents read an image each (Jaegle et al. 2021, arXiv:2103.03206).

Further shape letters: U units, S patches of a unit with its padding, Q latents, K heads of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.layers import TowerMLP, in_blocks, in_turn, tower_axis
from jaxengine.models.vision.base.vit import VitTowerConfig, linear, read_vit, table

TOWER, CONNECTOR = "vision_model", "connector"
_PROJECTION, _PERCEIVER = f"{CONNECTOR}.modality_projection", f"{CONNECTOR}.perceiver_resampler"
# transformers' defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_LIMITS = {"resampler_n_latents": 1024, "resampler_depth": 64, "resampler_n_heads": 4096, "resampler_head_dim": 4096}
# Elements between the products of a perceiver layer's MLP, in hidden sizes.
_WIDER = 4
# Most patches whose MLP is computed at once: it is as wide as the text's, many times the width of SigLIP's states.
_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Idefics2TowerConfig(VitTowerConfig):
    """Sizes of the tower.

    Attributes:
      vit: sizes of SigLIP, whose learned positions are spread over an image of any shape.
      projection_size: elements between the products of the MLP after SigLIP.
      projection_activation, activation: of that MLP, and of those of the perceiver.
      num_latents, num_layers, num_heads, num_kv_heads, head_dim: sizes of the perceiver.
      norm_eps: of the perceiver's norms.
    """

    projection_size: int
    projection_activation: str
    activation: str
    num_latents: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    def make(self, hidden_size: int, build: Build) -> Idefics2Tower:
        return Idefics2Tower(self, hidden_size, build)


def read_idefics2(fields: ConfigFields, text: ConfigFields) -> Idefics2TowerConfig:
    """Return the tower's configuration from a config.json and its text part, with the defaults of both: read_vit's
    fields from `vision_config`, and the names of _LIMITS (by default 64, 3, 16 and 96) and `num_key_value_heads` (4)
    from `perceiver_config`.

    The perceiver has the text's hidden size, whatever its own `hidden_size` (default: 4096) is; if they differ, its
    norms have the text's epsilon, as in transformers. Raises ModelConfigError for wrong fields, for heads of keys that
    do not divide those of queries, and sizes of the perceiver above _LIMITS.
    """
    vit = read_vit(fields.part_or_empty("vision_config", **_DEFAULTS))
    found = fields.part_or_empty("perceiver_config")
    own = found.integer("hidden_size", 4096) == text.integer("hidden_size")
    sizes = {}
    for (name, most), default in zip(_LIMITS.items(), (64, 3, 16, 96), strict=True):
        sizes[name] = found.integer(name, default)
        if sizes[name] > most:
            raise found.fail(name, f"an integer from 1 to {most}")
    latents, depth, heads, head_dim = sizes.values()
    kv_heads = found.integer("num_key_value_heads", 4)
    if heads % kv_heads:
        raise found.fail("num_key_value_heads", f"a divisor of resampler_n_heads {heads}")
    merge = -(-vit.num_patches // latents)
    return Idefics2TowerConfig(
        num_features=vit.num_features,
        columns=("place",),
        merge=merge,
        unit=merge * latents,
        vit=vit,
        projection_size=text.integer("intermediate_size"),
        projection_activation=read_activation(text, "hidden_act", "silu"),
        activation=read_activation(found, "hidden_act", "silu"),
        num_latents=latents,
        num_layers=depth,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=found.number("rms_norm_eps", 1e-6) if own else text.number("rms_norm_eps", 1e-6),
    )


class Idefics2Tower(nnx.Module):
    """Vision tower of Idefics2.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D]: Q of each unit. "place" is the
    learned position of a patch; -1 for padding, which no patch attends to.
    """

    def __init__(self, config: Idefics2TowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = ClipEncoder(config.vit, (config.vit.num_layers,), TOWER, build, with_last_norm=True)
        # Its result has another size than what it is given, which TowerMLP's has not.
        inner, axes = config.projection_size, ("embed", tower_axis("ffn", build))
        sources = tuple(Source(f"{_PROJECTION}.{name}_proj", inner) for name in ("gate", "up"))
        self.up = Linear(config.vit.hidden_size, sources, axes=axes, build=build)
        self.down = linear(inner, f"{_PROJECTION}.down_proj", hidden_size, ("ffn", "embed"), build, bias=False)
        self.latents = table(config.num_latents, hidden_size, f"{_PERCEIVER}.latents", build)
        self.layers = nnx.List([_Layer(config, hidden_size, number, build) for number in range(config.num_layers)])
        self.norm = RMSNorm(hidden_size, config.norm_eps, source=f"{_PERCEIVER}.norm", build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config, place = self.config, columns[0]
        states = self.encoder(patches, place, config.unit)
        with jax.named_scope("projection"):
            context = in_blocks(self.projected, states, _ROWS)
        is_key = place.reshape(-1, config.unit) >= 0
        latents = self.latents[...]
        x = jnp.broadcast_to(latents, (len(is_key), *latents.shape)).reshape(-1, latents.shape[1])
        x = in_turn(self.layers, x, context, is_key, name="perceiver")
        return self.norm(x)

    def projected(self, states: jax.Array) -> jax.Array:
        """Return SigLIP's states [P, E] in the text's hidden size, [P, D]: down(activation(gate) * up)."""
        gate, up = (part.astype(jnp.float32) for part in jnp.split(self.up(states), 2, axis=-1))
        return self.down((ACTIVATIONS[self.config.projection_activation](gate) * up).astype(states.dtype))


class _Layer(nnx.Module):
    """Layer of the perceiver: x + attention of latents to the patches of their unit and to each other, then x + mlp(x),
    each after a norm.
    """

    def __init__(self, config: Idefics2TowerConfig, size: int, number: int, build: Build):
        source, heads = f"{_PERCEIVER}.layers.{number}", tower_axis("heads", build)
        self.head_dim = head_dim = config.head_dim
        self.latents_norm, self.context_norm, self.mlp_norm = (
            RMSNorm(size, config.norm_eps, source=f"{source}.{name}", build=build)
            for name in ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
        )

        def project(*parts: tuple[str, int]) -> Linear:
            sources = tuple(
                Source(f"{source}.self_attn.{name}_proj", count * head_dim, group=head_dim) for name, count in parts
            )
            return Linear(size, sources, axes=("embed", heads), build=build)

        self.q = project(("q", config.num_heads))
        self.kv = project(("k", config.num_kv_heads), ("v", config.num_kv_heads))
        inner = config.num_heads * head_dim
        self.out = linear(inner, f"{source}.self_attn.o_proj", size, ("heads", "embed"), build, bias=False)
        self.mlp = TowerMLP(
            size,
            _WIDER * size,
            up=(f"{source}.mlp.gate_proj", f"{source}.mlp.up_proj"),
            down=f"{source}.mlp.down_proj",
            activation=ACTIVATIONS[config.activation],
            build=build,
            bias=False,
        )

    def __call__(self, x: jax.Array, context: jax.Array, is_key: jax.Array) -> jax.Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)), for latents x [U * Q, D], which attend to the patches'
        normed states, context [U * S, D], and to each other. is_key: bool[U, S], patches that are attended to.
        """
        count, own = len(is_key), self.latents_norm(x)
        with jax.named_scope("attention"):
            q = self.q(own).reshape(count, len(x) // count, -1, self.head_dim)
            patches, latents = (
                self.kv(states).reshape(count, len(states) // count, 2, -1, self.head_dim)
                for states in (self.context_norm(context), own)
            )
            seen = jnp.concatenate([is_key, jnp.ones(q.shape[:2], bool)], axis=1)
            o = lax.map(_attend, (q, jnp.concatenate([patches, latents], axis=1), seen))
            x = x + self.out(o.reshape(len(x), -1))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


def _attend(unit: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Return the attention output [Q, N, H] of one unit's queries [Q, N, H] to the keys and values [S + Q, 2, K, H] of
    which bool[S + Q] are seen, each for N / K neighbouring heads of queries.
    """
    q, keys_values, seen = unit
    k, v = (jnp.repeat(keys_values[:, part], q.shape[1] // keys_values.shape[2], axis=1) for part in (0, 1))
    scores = jnp.einsum("qnh,snh->nqs", q, k, preferred_element_type=jnp.float32) * q.shape[2] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("nqs,snh->qnh", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)
