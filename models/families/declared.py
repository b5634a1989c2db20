"""Layers and decoder of families that only combine existing parts, built from the row that describes a family.

Rows are jaxengine.models.families.declared_row.Row, in the tables of declared_rows and similar modules. A family with a
part of its own has its own file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.declared import (
    AFTER,
    AROUND,
    OUTPUT,
    PARALLEL,
    WITHIN,
    DeclaredForm,
)
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import Classifier
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.state import GatedRecurrence, LinearState, SelectiveScan, ShortConvolution, StateSpace
from jaxengine.models.families.declared_attention import NORMS, DeclaredAttention
from jaxengine.models.families.declared_row import Row
from jaxengine.models.families.llama import LAYER as LAYER_NAME
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.mla import LATENT_EPS, LatentAttention
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.embedding import Embedding, sinusoids, vocab_bias, vocab_source
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import MLP, GatedMLP, ThenClamped
from jaxengine.models.layers.base.norm import (
    HeadsRMSNorm,
    Identity,
)
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.classify import SCORE, DenseLabelScores
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.layers.looped import LoopedLayer, share_blocks
from jaxengine.models.layers.states.lightning import LightningAttention, lightning_slopes
from jaxengine.models.layers.states.mamba import Mamba
from jaxengine.models.layers.states.mamba2 import Mamba2
from jaxengine.models.layers.states.rglru import RecurrentBlock
from jaxengine.models.layers.states.short_conv import ShortConv
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.models.params.source import CheckpointNames, NextLayer, StackedExperts
from jaxengine.pallas_kernels.kv.pages import KVPages


class DeclaredLayer(nnx.Module):
    """Layer of a DeclaredForm, composed of the given attention, or mixer with a state, and MLP (None for no MLP, and
    then no norm or factor follows attention's sum). It has the norms that the form's placement requires, before or
    after each part, both, or after each sum. With placement PARALLEL the MLP reads what attention reads, or the same
    state with a norm of its own, and both are added in one sum without factors of the hidden state. With WITHIN the
    norm's result is what a part is added to.

    residuals: for attention and for the MLP, (factor of the hidden state, factor of the part's output) in the sum of
    the two. The second is multiplied by config.residual_multiplier; the first of attention is not used without an MLP.
    """

    input_norm: Any
    mlp_norm: Any

    def __init__(
        self,
        config: ModelConfig,
        form: DeclaredForm,
        attention: nnx.Module,
        mlp: nnx.Module | None,
        residuals: tuple[tuple[float, float], ...],
        build: Build,
    ):
        """Create the norms of the form's placement. The first layer's first norm is an identity unless `first_norm`.
        residuals: for attention and MLP the factors of (x, the part's output), to which residual_multiplier is applied.
        """
        norm = partial(NORMS[form.norm], config.hidden_size, config.rms_norm_eps, build=build)
        offsets = [{"offset": each} for each in form.norm_offsets] or [{}] * len(form.norms)
        norms: list[nnx.Module] = [
            norm(source=f"{LAYER_NAME}.{name}", **offset) for name, offset in zip(form.norms, offsets, strict=True)
        ]
        if build.layer == 0 and not form.first_norm:
            norms[0] = Identity()
        if form.placement == AROUND:
            self.input_norm, self.attended_norm, self.mlp_norm, self.output_norm = norms
        elif form.placement == OUTPUT:
            self.attended_norm, self.output_norm = norms
        else:
            self.input_norm, *rest = norms
            self.mlp_norm = rest[0] if rest else None
        self.attention, self.mlp, self.placement = attention, mlp, form.placement
        self.kept = tuple(kept for kept, _ in residuals)
        self.multipliers = tuple(config.residual_multiplier * given for _, given in residuals)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        late, norms_output = self.placement in (AFTER, OUTPUT), self.placement in (OUTPUT, AROUND)
        normed = x if late else self.input_norm(x)
        x = normed if self.placement == WITHIN else x
        with jax.named_scope("attention"):
            attended, kv = self.attention(normed, kv, pages, step)
            attended = scaled(self.attended_norm(attended) if norms_output else attended, self.multipliers[0])
        if self.mlp is None:
            return x + attended, kv
        with jax.named_scope("mlp"):
            if self.placement == PARALLEL:
                normed = normed if self.mlp_norm is None else self.mlp_norm(x)
                return x + attended + scaled(self.mlp(normed, step.rows), self.multipliers[1]), kv
            x = scaled(x, self.kept[0]) + attended
            x = self.input_norm(x) if self.placement == AFTER else x
            normed = x if late else self.mlp_norm(x)
            x = normed if self.placement == WITHIN else x
            added = self.mlp(normed, step.rows)
            added = scaled(self.output_norm(added) if norms_output else added, self.multipliers[1])
            x = scaled(x, self.kept[1]) + added
            return self.mlp_norm(x) if self.placement == AFTER else x, kv


class NormedMLP(nnx.Module):
    """Feed-forward part with a norm of its output: norm(mlp(x))."""

    def __init__(self, mlp: nnx.Module, norm: nnx.Module):
        self.mlp, self.norm = mlp, norm

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        return self.norm(self.mlp(x, rows))


class ProjectedHead(nnx.Module):
    """Projection between the last hidden states and the LM head: norm(activation(dense(x))), with the names of the two
    modules from `form.head`.
    """

    def __init__(self, config: ModelConfig, form: DeclaredForm, build: Build):
        size, (dense, norm) = config.hidden_size, form.head
        bias = form.head_dense_bias
        self.dense = Linear(size, (Source(dense, size),), axes=("embed", "latent"), bias=bias, build=build)
        self.norm = NORMS[form.norm](size, config.rms_norm_eps, source=norm, build=build)
        self.activation = ACTIVATIONS[form.head_activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return norm(activation(dense(x))) of hidden states [R, D], of the same shape. The activation is computed in
        float32.
        """
        return self.norm(self.activation(self.dense(x, out_dtype=jnp.float32)).astype(x.dtype))


class DeclaredForCausalLM(Decoder):
    """Decoder of DeclaredLayers. Each subclass has a `row`, which describes its family."""

    row: ClassVar[Row]

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.row.read(fields)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return cls.row.read_gguf(gguf)

    def __init__(self, config: ModelConfig, build: Build):
        """Create the decoder and, as far as the form has them and the stage needs them, the norm of embeddings, the
        table of positions, the projections of narrower embeddings, the projection before the LM head, and its bias.
        Raises ModelConfigError for narrower embeddings in a model that pools.
        """
        assert config.declared is not None
        self.form = form = config.declared
        super().__init__(config, build)
        if config.loops is not None:
            share_blocks(self)
        stage, size, inner = self.stage, config.hidden_size, form.embedding_size
        scores = stage.is_last and config.pooler is None
        if config.pooler is not None and inner is not None:
            text = f"word_embed_proj_dim must be hidden_size = {size} for a model that pools, got {inner}"
            raise ModelConfigError(text)
        if stage.is_first and form.embedding_norm is not None:
            norm = NORMS[form.norm]
            self.embedding_norm = norm(size, config.rms_norm_eps, source=form.embedding_norm, build=self.build)
        if stage.is_first and form.positions is not None:
            rows = config.max_position_embeddings + form.first_position
            decl = ParamDecl((None, None), (Source(form.positions, rows).tensor("weight"),), init_std=0.02)
            self.positions = declare((rows, size), build.dtype, decl)
        if stage.is_first and inner is not None:
            source = (Source("model.project_in", size),)
            self.project_in = Linear(inner, source, axes=("embed", "latent"), build=self.build)
        if scores and inner is not None:
            source = (Source("model.project_out", inner),)
            self.project_out = Linear(size, source, axes=("embed", "latent"), build=self.build)
            if not config.tie_word_embeddings:
                head = vocab_source("lm_head", config.vocab_size, self.mesh, config.num_logits)
                self.lm_head = Linear(inner, (head,), axes=("embed", "vocab"), build=self.build)
        if scores and form.head:
            self.head = ProjectedHead(config, form, self.build)
        if scores and form.head_bias:
            self.head_bias = vocab_bias("lm_head", config.vocab_size, self.build)

    def make_embedding(self, build: Build) -> Any:
        size = self.form.embedding_size or self.config.hidden_size
        return Embedding(self.config.vocab_size, size, source="model.embed_tokens", build=build)

    def make_labels(self, classifier: Classifier, build: Build) -> Any:
        """Return the module that scores labels, after the form's projection and norm if it has these before logits.
        Raises ModelConfigError for labels that stand for logits of tokens if these have a projection or a bias.
        """
        form = self.form
        if classifier.token_ids and (form.head or form.head_bias):
            raise ModelConfigError(f"classifier_from_token must be absent for {type(self).__name__}, with its own head")
        if not form.head:
            return super().make_labels(classifier, build)
        size, (dense, norm), bias = self.config.hidden_size, form.head, form.head_dense_bias
        return DenseLabelScores(
            size,
            classifier,
            (dense, SCORE),
            activation=ACTIVATIONS[form.head_activation],
            build=build,
            dense_bias=bias,
            labels_bias=bias,
            norm=lambda build: NORMS[form.norm](size, self.config.rms_norm_eps, source=norm, build=build),
        )

    def make_norm(self, build: Build) -> Any:
        if not self.form.final_norm:
            return Identity()
        norm = NORMS[self.form.norm]
        return norm(self.config.hidden_size, self.config.rms_norm_eps, source="model.norm", build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        loops = self.config.loops
        if loops is None:
            return self._make_block(layer, build)
        norm = self.make_norm(build) if loops.normed and loops.loop(layer) else None
        return LoopedLayer(self._make_block(layer, replace(build, layer=self.config.stored_layer(layer))), norm)

    def _make_block(self, layer: int, build: Build) -> DeclaredLayer:
        """Return a new layer of the checkpoint, number `build.layer`, as layer number `layer` of the model. The factors
        of its residuals are the form's or, if `depth_scaled`, sqrt((n - 1) / n) and 1 / sqrt(n), with n twice the
        layer's number plus 2 for attention and 3 for the MLP.
        """
        mixer, mlp = self.make_mixer(layer, build), self.make_mlp(layer, build) if self.form.up else None
        of_attention, of_state, of_mlp = self.form.residuals
        residuals = of_attention if self.config.attention[layer].state is None else of_state, of_mlp
        if self.form.depth_scaled:
            numbers = 2 * layer + 2, 2 * layer + 3
            residuals = tuple((((number - 1) / number) ** 0.5, number**-0.5) for number in numbers)
        return DeclaredLayer(self.config, self.form, mixer, mlp, residuals, build)

    def make_mixer(self, layer: int, build: Build) -> nnx.Module:
        """Return the attention of a layer, over latents if it has them, or the module that keeps its state (Mamba,
        Mamba-2, lightning attention, a short convolution or a gated recurrence), as `config.attention[layer]` requires:
        ([T, D], cache, pages, StepInputs) -> ([T, D], cache).
        """
        config, form, own = self.config, self.form, self.config.attention[layer]
        size, eps, source = config.hidden_size, config.rms_norm_eps, f"{LAYER_NAME}.{form.mixer}"
        if isinstance(own.state, SelectiveScan):
            return Mamba(own.state, size, source=source, build=build)
        if isinstance(own.state, StateSpace):
            return Mamba2(own.state, size, eps=eps, source=source, build=build)
        if isinstance(own.state, LinearState):
            slopes = lightning_slopes(own.state.num_heads, layer, config.num_layers)
            return LightningAttention(own.state, size, slopes=slopes, source=source, build=build)
        if isinstance(own.state, ShortConvolution):
            return ShortConv(own.state, size, source=source, build=build)
        if isinstance(own.state, GatedRecurrence):
            return RecurrentBlock(own.state, size, source=source, build=build)
        if own.latent is not None:
            eps = LATENT_EPS if form.latent_eps is None else form.latent_eps
            return LatentAttention(own, size, source=f"{LAYER_NAME}.self_attn", build=build, eps=eps)
        return DeclaredAttention(form, own, size, eps=eps, build=build)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        """Return the feed-forward part of a layer, ([T, D], Rows) -> [T, D]. In layers with experts it is a mixture of
        experts, followed by a norm if the form names one; otherwise an MLP, gated if the form has gate and up
        projections. Activations of experts and of MLPs beside or in place of them have the layer's bounds (`limits`), a
        gated MLP also the norm `inner_norm`, if the form has these.
        """
        config, form, experts = self.config, self.form, self.config.experts
        of_experts, of_mlp = form.limits[layer] if form.limits else (None, None)
        clamped = None if of_mlp is None else ThenClamped(of_mlp, ACTIVATIONS[form.activation])
        if experts is not None and layer not in experts.dense_layers:
            source, names = f"{LAYER_NAME}.{self.row.experts_in}", self.row.expert_names
            options: dict[str, Any] = {"router_dtype": jnp.float32, "build": build}
            if of_experts is not None:
                options["activation"] = ThenClamped(of_experts, ACTIVATIONS[form.activation])
            mixture = MixtureOfExperts(config, source=source, names=names, shared={"clamped": clamped}, **options)
            if form.experts_norm is None:
                return mixture
            norm = {"source": f"{LAYER_NAME}.{form.experts_norm}", "build": build}
            return NormedMLP(mixture, NORMS[form.norm](config.hidden_size, config.rms_norm_eps, **norm))
        size, ffn = config.hidden_size, config.intermediate_size
        options = {"activation": ACTIVATIONS[form.activation], "bias": config.mlp_bias, "build": build}
        if len(form.up) == 1 and not form.joined_up:
            return MLP(size, ffn, source=LAYER_NAME, up=form.up[0], down=form.down, **options)
        gate_up = tuple(Source(f"{LAYER_NAME}.{name}", ffn) for name in form.up)
        gate_up = parts_of(gate_up[0].name, ffn, ffn) if form.joined_up else gate_up
        down = Source(f"{LAYER_NAME}.{form.down}", size)
        if form.inner_norm is not None:
            named = {"source": f"{LAYER_NAME}.{form.inner_norm}", "axis": "ffn", "build": build}
            options["inner_norm"] = HeadsRMSNorm(ffn, 1, config.rms_norm_eps, **named)
        if form.down_bias:
            options["down_bias"] = True
        return GatedMLP(size, ffn, source=LAYER_NAME, gate_up=gate_up, down=down, clamped=clamped, **options)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return a step's embeddings x [T, D] with the rows or the sinusoids of their positions added, if any."""
        numbers = batch.positions + self.form.first_position
        if self.form.sinusoids:
            added = sinusoids(numbers, x.shape[1])
        elif self.form.positions is None:
            return x
        else:
            added = self.positions[...][numbers]
        return (x.astype(jnp.float32) + added.astype(jnp.float32)).astype(x.dtype)

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T], projected to the hidden size, scaled and normed as the form
        says.
        """
        x = super().embed_tokens(token_ids)
        x = x if self.form.embedding_size is None else self.project_in(x)
        if self.form.root_scaled:
            x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        return x if self.form.embedding_norm is None else self.embedding_norm(x)

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits f32[R, V / n] of hidden states [R, D] after the form's projections."""
        hidden = hidden if self.form.embedding_size is None else self.project_out(hidden)
        return super().token_logits(self.head(hidden) if self.form.head else hidden)


def declared_class(name: str, row: Row) -> type[DeclaredForCausalLM]:
    """Return a new subclass of DeclaredForCausalLM, called `name`, for one row. It has the row's names of tensors, its
    GGUF architecture (None without `gguf`), and `about` as its docstring.
    """
    experts = row.expert_names
    names = CheckpointNames(
        prefixes=(*row.names, ("classifier.", "score.")),  # some classes of transformers call scores of tokens so
        suffixes=row.suffixes,
        squeezed=row.squeezed,
        flattened=row.flattened,
        transposed=row.transposed,
        unused_ends=row.unused_ends,
        unused=row.unused,
        parts=row.parts,
        divided=row.divided,
        stacked_experts=StackedExperts(modules=(experts.gate, experts.up, experts.down)),
        expert_rows=row.expert_rows,
        next_layer=row.next_layer or NextLayer(),
    )
    architecture = None if row.gguf is None else row.gguf.architecture
    members = {
        "row": row,
        "gguf_architecture": architecture,
        "checkpoint_names": names,
        "__doc__": row.about,
        "__module__": __name__,
    }
    return type(name, (DeclaredForCausalLM,), members)
