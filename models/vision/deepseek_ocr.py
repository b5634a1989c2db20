"""Vision tower of DeepSeek-OCR 2 (Wei et al. 2026): SAM's encoder, then layers of Qwen 2 over its rows and as many
learned queries, whose states are an image's embeddings.

An image is encoded as a whole and, where it is large, also in tiles, which have three quarters of its rows and columns.
A unit is a square of the larger size: a tile is its upper left corner.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_HIDDEN, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.layers import PatchEmbedding, TowerMLP, in_turn, rope_frequencies, tower_axis
from jaxengine.models.vision.base.vit import VitConfig, linear, table, vector
from jaxengine.models.vision.sam import FLATTENED, SamConfig, SamEncoder, convolved, read_sam

TOWER, PROJECTOR, SEPARATOR = "vision_tower", "multi_modal_projector", "view_separator"
# Kernels of convolutions, which are matrices here.
KERNELS = (*FLATTENED, ".proj.conv1.weight", ".proj.conv2.weight")
# Patches along a side that become one row.
_MERGE = 4
# transformers' defaults of fields that a file lacks.
_ENCODER = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """Sizes of the layers after SAM's encoder, which are Qwen 2's. theta: base of their rotary frequencies. activation:
    name of that of their MLPs.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    theta: float
    activation: str


@dataclass(frozen=True, kw_only=True)
class DeepseekOcr2TowerConfig(TowerConfig):
    """SAM's encoder, two convolutions, and Qwen 2's layers.

    Attributes:
      sam: sizes of the first encoder.
      channels: output channels of the two convolutions.
      encoder: sizes of the second encoder.
    """

    sam: SamConfig
    channels: tuple[int, int]
    encoder: EncoderSizes

    @property
    def vit(self) -> VitConfig:
        """Sizes of SAM's layers, for units as large as a whole image."""
        return self.sam.vit

    @property
    def tile_grid(self) -> int:
        """Number of patches along a side of a tile: three quarters of a unit's."""
        return self.sam.vit.grid * 3 // 4

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return DeepseekOcr2Tower(self, hidden_size, build)


def read_deepseek_ocr2(fields: ConfigFields) -> DeepseekOcr2TowerConfig:
    """Return the vision tower's configuration from `sam_config` and `encoder_config` in vision_config of a config.json.
    Raises ModelConfigError for wrong fields, for an image_size that is not a multiple of 16 patches, and unless
    downsample_channels are two sizes of which the second is the encoder's.
    """
    vision = fields.part("vision_config")
    sam = read_sam(vision, "sam_config", mlp_ratio=True)
    first = vision.part("sam_config")
    if sam.vit.grid % (4 * _MERGE):
        raise first.fail("image_size", f"a multiple of 16 * patch_size = {4 * _MERGE * sam.vit.patch_size}")
    encoder = _read_encoder(vision.part("encoder_config", **_ENCODER))
    return DeepseekOcr2TowerConfig(
        num_features=sam.vit.num_features,
        columns=("side",),
        merge=_MERGE**2,
        # A further row is the separator after an image.
        unit=sam.vit.num_patches + _MERGE**2,
        sam=sam,
        channels=read_channels(first, (512, 896), encoder.hidden_size),
        encoder=encoder,
    )


def read_channels(sam: ConfigFields, default: tuple[int, int], size: int) -> tuple[int, int]:
    """Return `downsample_channels` of the first encoder, `default` if it is absent, null or empty. Raises
    ModelConfigError unless it is two sizes of which the second is `size`, the second encoder's.
    """
    channels = sam.value("downsample_channels", None) or default
    right = isinstance(channels, (list, tuple)) and len(channels) == 2 and channels[1] == size
    if not right or any(type(each) is not int or not 1 <= each <= MAX_HIDDEN for each in channels):
        allowed = f"two sizes up to {MAX_HIDDEN}, the second encoder_config.hidden_size {size}"
        raise sam.fail("downsample_channels", allowed)
    return channels[0], channels[1]


def _read_encoder(fields: ConfigFields) -> EncoderSizes:
    """Return the sizes of the second encoder from its fields, which have the usual names of a text model; `rope_theta`,
    also in `rope_parameters` or `rope_scaling`, is 10,000 by default. Raises ModelConfigError for wrong fields, and for
    windows, for scaled frequencies, and for numbers of heads that do not divide each other and the hidden size.
    """
    fields.require(use_sliding_window=False)
    rope = ConfigFields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
    if (rope.text("rope_type", None) or rope.text("type", "default")) != "default":
        raise fields.fail("rope_parameters", 'a mapping with the rope_type "default"')
    size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", None) or heads
    if size % (2 * heads):
        raise fields.fail("num_attention_heads", f"such that hidden_size {size} is an even multiple of it")
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    return EncoderSizes(
        hidden_size=size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        norm_eps=fields.number("rms_norm_eps"),
        theta=rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0),
        activation=read_activation(fields, default="silu"),
    )


class _Layer(nnx.Module):
    """Layer of the second encoder, which computes x + attention(norm(x)), then x + mlp(norm(x)). source: prefix of its
    modules.
    """

    def __init__(self, sizes: EncoderSizes, source: str, build: Build):
        size, attention, mlp = sizes.hidden_size, f"{source}.self_attn", f"{source}.mlp"
        self.head_dim = size // sizes.num_heads
        inner = self.head_dim * sizes.num_kv_heads
        eps, names = sizes.norm_eps, (f"{source}.input_layernorm", f"{source}.post_attention_layernorm")
        self.norm1, self.norm2 = (RMSNorm(size, eps, source=name, build=build) for name in names)
        heads = tower_axis("heads", build)
        sources = (Source(f"{attention}.{name}_proj", out) for name, out in (("q", size), ("k", inner), ("v", inner)))
        self.q, self.k, self.v = (
            Linear(size, (each._replace(group=self.head_dim),), axes=("embed", heads), bias=True, build=build)
            for each in sources
        )
        self.out = linear(size, f"{attention}.o_proj", size, ("heads", "embed"), build, bias=False)
        self.mlp = TowerMLP(
            size,
            sizes.intermediate_size,
            up=(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=f"{mlp}.down_proj",
            activation=ACTIVATIONS[sizes.activation],
            build=build,
            bias=False,
        )

    def __call__(self, x: jax.Array, turns: tuple[jax.Array, jax.Array], seen: jax.Array) -> jax.Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)), for x [U * S, D]. turns: cos and sin of the positions.
        seen: bool[U, S, S], the keys (last axis) that each query sees.
        """
        units, count = seen.shape[:2]
        with jax.named_scope("attention"):
            y = self.norm1(x)
            q, k, v = (each(y).reshape(len(x), -1, self.head_dim) for each in (self.q, self.k, self.v))
            q, k = (apply_rope(each, *turns).reshape(units, count, -1, self.head_dim) for each in (q, k))
            o = lax.map(_attend, (q, k, v.reshape(k.shape), seen))
            x = x + self.out(o.reshape(len(x), -1))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.norm2(x))


def _attend(own: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Return the attention output [S, N, H] within a unit, given (q [S, N, H], k and v [S, K, H], seen bool[S, S], the
    keys that each query sees).
    """
    q, k, v, seen = own
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("skgh,tkh->kgst", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1).astype(v.dtype)
    o = jnp.einsum("kgst,tkh->skgh", weights, v, preferred_element_type=jnp.float32)
    return o.astype(v.dtype).reshape(q.shape)


class DeepseekOcr2Tower(nnx.Module):
    """Vision tower of DeepSeek-OCR 2. The column "side" has the number of rows and columns of a unit's patches; patches
    after them are empty.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: DeepseekOcr2TowerConfig, hidden_size: int, build: Build):
        self.config = config
        sizes, (first, second) = config.encoder, config.channels
        sam, encoder = f"{TOWER}.sam_encoder", f"{TOWER}.vision_encoder"
        self.sam = SamEncoder(config.sam, sam, build)
        channels = 9 * config.sam.out_size, 9 * first
        self.first = PatchEmbedding(channels[0], first, source=f"{sam}.proj.conv1", bias=False, build=build)
        self.second = PatchEmbedding(channels[1], second, source=f"{sam}.proj.conv2", bias=False, build=build)
        made = [_Layer(sizes, f"{encoder}.layers.{number}", build) for number in range(sizes.num_layers)]
        self.layers = nnx.List(made)
        self.norm = RMSNorm(second, sizes.norm_eps, source=f"{encoder}.norm", build=build)
        whole, tile = ((side // _MERGE) ** 2 for side in (config.vit.grid, config.tile_grid))
        self.whole_queries = table(whole, second, f"{TOWER}.query_1024_resolution.weight", build)
        self.tile_queries = table(tile, second, f"{TOWER}.query_768_resolution.weight", build)
        self.projector = linear(second, PROJECTOR, hidden_size, ("embed", "embed"), build)
        self.separator = vector(hidden_size, SEPARATOR, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config = self.config
        sides = columns[0].reshape(-1, config.unit)[:, 0]
        units = patches.reshape(-1, config.unit, patches.shape[1])[:, : config.vit.num_patches]
        x = self.sam(units.reshape(-1, patches.shape[1]), sides)
        # With a stride of two over an even number of positions, of which the last has none after it.
        with jax.named_scope("downsampling"):
            x = convolved(convolved(x, self.first, 2), self.second, 2)
        with jax.named_scope("encoder"):
            x = self._encoded(x.reshape(len(sides), -1, x.shape[-1]), sides // _MERGE)
        with jax.named_scope("projector"):
            rows = self.projector(x.reshape(-1, x.shape[-1])).reshape(len(sides), -1, len(self.separator[...]))
            ends = jnp.broadcast_to(self.separator[...], (len(sides), 1, rows.shape[-1]))
            return jnp.concatenate([rows, ends], axis=1).reshape(-1, rows.shape[-1])

    def _encoded(self, x: jax.Array, sides: jax.Array) -> jax.Array:
        """Return the states of queries, [U, S, D], of which the first `sides` squared of each unit count.

        x: [U, S, D], each unit's rows, line by line. sides: i32[U]; the first `sides` rows of the first `sides` lines
        of a unit are in use. They see each other, and precede the queries, which also see the queries before them.
        """
        units, count, size = x.shape
        grid = int(count**0.5)
        used = sides[:, None] ** 2
        number = jnp.arange(count)
        line, place = number // grid, number % grid
        is_row = (line < sides[:, None]) & (place < sides[:, None])
        tile = jnp.pad(self.tile_queries[...], ((0, count - len(self.tile_queries[...])), (0, 0)))
        queries = jnp.where((sides == grid)[:, None, None], self.whole_queries[...], tile)
        x = jnp.concatenate([x, queries.astype(x.dtype)], axis=1).reshape(-1, size)
        positions = jnp.concatenate([line * sides[:, None] + place, used + number], axis=1).reshape(-1)
        half = size // self.config.encoder.num_heads
        angles = positions[:, None] * rope_frequencies(half, self.config.encoder.theta).astype(jnp.float32)
        no_query = jnp.zeros((units, 2 * count, count), bool).at[:, count:].set(number <= number[:, None])
        seen = jnp.concatenate([jnp.broadcast_to(is_row[:, None], no_query.shape), no_query], axis=2)
        x = in_turn(self.layers, x, (jnp.cos(angles), jnp.sin(angles)), seen)
        return self.norm(x).reshape(units, 2 * count, size)[:, count:]
