"""View of Mistral AI's own checkpoints, consolidated*.safetensors, under the names of transformers' classes.

Queries and keys are rotated there in pairs of neighbouring elements, so the rows of their projections are put into the
order of models that rotate the first half of a head with the second. Latent attention keeps its pairs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import numpy as np

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.source import WHOLE, WeightSource
from jaxengine.models.params.stored_names import fault_in
from jaxengine.models.weights.views.renamed import NamedSource

_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_INDEXER = ("wq_b", "wk", "weights_proj", "q_input_norm", "k_norm")
_LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attention.w{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"attention.w{name}": f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_b")},
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    **{f"attention.{name}_norm": f"self_attn.{name}_layernorm" for name in ("q_a", "kv_a")},
    **{f"feed_forward.{old}": f"mlp.{new}" for old, new in _PARTS.items()},
    **{f"shared_experts.{old}": f"mlp.shared_experts.{new}" for old, new in _PARTS.items()},
    "attention.ssmax_scaling": "self_attn.softmax_scaling",
    "attention.indexer.ssmax_scaling": "self_attn.indexer.softmax_scaling",
    **{f"attention.indexer.{name}": f"self_attn.indexer.{name}" for name in _INDEXER},
}
_TOWER_LAYER = {
    **{f"attention.w{name}": f"attention.{name}_proj" for name in "qkvo"},
    **{f"feed_forward.{old}": f"feed_forward.{new}" for old, new in _PARTS.items()},
}
_OUTER = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "lerope": "model.rotary_emb",
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
}
# Ends of names: of the scales of fp8 weights and of their inputs, and of the factors of queries by their positions.
_ENDS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale", "s": "scale", "b": "bias"}
_CACHED = re.compile(r"layers\.(\d+)\.attention\.(kv|[qkv])_fake_quantizer\.qscale_act")
_IN_LAYER = re.compile(r"(vision_encoder\.transformer\.)?layers\.(\d+)\.(.+)")
_ROUTER, _EXPERT = re.compile(r"(?:feed_forward\.)?gate"), re.compile(r"(?:feed_forward\.)?experts\.(\d+)\.(w[123])")
TOWER = "vision_tower."
# A tensor that only files with Mistral AI's names have. InternLM's, whose other names are the same, have wqkv.
_QUERIES = re.compile(r"(language_model\.)?layers\.\d+\.attention\.wq(_a)?\.\w+")


def renamed(stored: str, *, latent: bool = False) -> str:
    """Return the name that transformers' class gives to the tensor `stored`. An unknown one keeps its name apart
    from the beginning and the end.

    latent: whether the model has latent attention, whose class names its experts as DeepSeek's do; others as Mixtral.
    """
    stored = stored.removeprefix("language_model.")
    if found := _CACHED.fullmatch(stored):
        return f"model.layers.{found[1]}.self_attn.{found[2]}_scale"
    module, _, end = stored.rpartition(".")
    end = _ENDS.get(end, end)
    if found := _IN_LAYER.fullmatch(module):
        in_tower, layer, inner = found.groups()
        if in_tower:
            return f"{TOWER}transformer.layers.{layer}.{_TOWER_LAYER.get(inner, inner)}.{end}"
        return f"model.layers.{layer}.{_in_layer(inner, latent)}.{end}"
    if module.startswith("vision_encoder."):
        return f"{TOWER}{module.removeprefix('vision_encoder.')}.{end}"
    return f"{_OUTER[module]}.{end}" if module in _OUTER else stored


def _in_layer(inner: str, latent: bool) -> str:
    """Return the name, within a layer of the text model, of the module that is stored as `inner`. latent:
    whether the model has latent attention.
    """
    mixture = "mlp" if latent else "block_sparse_moe"
    if _ROUTER.fullmatch(inner):
        return f"{mixture}.gate"
    if found := _EXPERT.fullmatch(inner):
        return f"{mixture}.experts.{found[1]}.{_PARTS[found[2]] if latent else found[2]}"
    return _LAYER.get(inner, inner)


def heads_in_pairs(config: ModelConfig) -> tuple[dict[str, int], bool]:
    """Return arguments of MistralSource for a model, (num_heads, latent): the number of heads by the end of the name of
    each module with rows of rotated heads (not the text's if attention is latent), and whether attention is latent.
    """
    first = config.attention[0]
    text = {"self_attn.q_proj": first.num_heads, "self_attn.k_proj": first.num_kv_heads}
    text = text if first.latent is None else {}
    seen = getattr(config.tower, "num_heads", None)
    tower = {} if seen is None else {f".attention.{name}_proj": seen for name in "qk"}
    return {**text, **tower}, first.latent is not None


def under_transformers_names(source: WeightSource, config: ModelConfig) -> WeightSource:
    """Return a MistralSource of a checkpoint with Mistral AI's names, and any other checkpoint as it is.

    The tensors' names decide, not the file's. config: the model. Raises the errors of MistralSource.
    """
    return MistralSource(source, *heads_in_pairs(config)) if any(map(_QUERIES.fullmatch, source.names())) else source


class MistralSource(NamedSource):
    """WeightSource of a checkpoint in Mistral AI's format under transformers' names, with its order of rows.

    num_heads: number of heads by the end of a projection's name ("self_attn.q_proj"), for all whose rows are rotated in
    pairs. latent: whether the model has latent attention. Raises ModelFileError for two tensors with one name, and for
    rows that do not split into heads of an even size.
    """

    def __init__(self, source: WeightSource, num_heads: Mapping[str, int], latent: bool):
        super().__init__(source, partial(renamed, latent=latent))
        # Tensors whose rows are put into another order -> rows of a head.
        self._head_dims: dict[str, int] = {}
        for name, stored in self._stored.items():
            module, _, end = name.rpartition(".")
            heads = next((count for last, count in num_heads.items() if module.endswith(last)), None)
            shape = source.shape(stored)
            if heads is None or not shape or shape[0] == 1 or end == "weight_shape":  # one value of a whole tensor
                continue
            if rows := self._rows_of_heads(module, shape[0], heads):
                self._head_dims[name] = rows
            elif rows is None:
                raise fault_in(source, stored, f"must have rows of {heads} heads of even size, got {shape}")

    def _rows_of_heads(self, module: str, num_rows: int, heads: int) -> int | None:
        """Return the number of rows of each head in a tensor of `num_rows` rows of a module; 0 if each of its rows is
        for whole heads, as a scale of blocks may be, None if rows cannot be put into another order.
        """
        held = (self._stored.get(f"{module}.{end}") for end in ("weight", "weight_packed"))
        found = next((self._source.shape(stored) for stored in held if stored is not None), (num_rows,))
        head_dim = found[0] // heads
        if found[0] % (2 * heads) or not num_rows or found[0] % num_rows:
            return None
        if num_rows == found[0]:
            return head_dim
        return 0 if (found[0] // num_rows) % head_dim == 0 else None

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        if name not in self._head_dims:
            return super().read(name, rows, columns)
        head_dim, count = self._head_dims[name], self.shape(name)[0]
        first, last, _ = rows.indices(count)
        start, end = first // head_dim * head_dim, -(-last // head_dim) * head_dim
        held = super().read(name, slice(start, end), columns)
        pairs = held.reshape(-1, head_dim // 2, 2, *held.shape[1:])
        return pairs.swapaxes(1, 2).reshape(held.shape)[first - start : last - start]
