"""Choice of a stage's optional capabilities. A capability's module is imported only when an engine starts with it."""

from __future__ import annotations

from collections.abc import Iterator

from jax.sharding import Mesh

from jaxengine.config.base.platforms import Platform
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.models.causal_lm import CausalLM
from jaxengine.runner.base.extension import DeviceExtension, StageShape
from jaxengine.runner.programs.step_programs import StepPrograms


def extensions_of(shape: StageShape) -> Iterator[DeviceExtension]:
    """Yield the DeviceExtensions that a stage needs for its model and options, in the order in which they take part in
    traced programs: drafts, adapters, towers, states, experts, pooling, steering, captured activations, routed experts,
    scores and grammars, and those of `_of_options`.
    """
    model, config = shape.model.config, shape.config
    if config.speculative_config is not None and shape.samples:
        from jaxengine.runner.extensions.drafts.section import DraftsExtension

        yield DraftsExtension(shape)
    if shape.model.build.lora is not None:
        from jaxengine.runner.extensions.adapters.section import AdaptersExtension

        yield AdaptersExtension(shape)
    yield from _tower_extensions(shape)
    if model.keeps_states:
        from jaxengine.runner.extensions.states.section import StatesExtension

        yield StatesExtension(shape)
    if model.experts is not None:
        from jaxengine.runner.extensions.experts import ExpertsExtension

        yield ExpertsExtension(shape)
    if model.pooler is not None and shape.model.stage.is_last:
        yield from _poolers(shape)
    if config.steer is not None:
        from jaxengine.runner.extensions.steering import SteeringExtension

        yield SteeringExtension(shape)
    if config.capture is not None or config.capture_layers is not None:
        from jaxengine.runner.extensions.capture import CaptureExtension

        yield CaptureExtension(shape)
    if config.enable_return_routed_experts:
        from jaxengine.runner.extensions.routed_experts import RoutedExpertsExtension

        yield RoutedExpertsExtension(shape)
    if shape.samples:
        from jaxengine.runner.extensions.scores import ScoresExtension
        from jaxengine.runner.extensions.structured import StructuredExtension

        yield ScoresExtension(shape)
        yield StructuredExtension(shape)
    yield from _of_options(shape)


def _of_options(shape: StageShape) -> Iterator[DeviceExtension]:
    """Yield the DeviceExtensions that depend on options alone, not on the model; those for sampling only in a stage
    that samples.
    """
    config = shape.config
    if config.enable_trace_replay and shape.samples:
        from jaxengine.runner.extensions.trace import TraceExtension

        yield TraceExtension(shape)
    if (config.enable_sampling_mass or config.return_sampling_mask) and shape.samples:
        from jaxengine.runner.extensions.mass import MassExtension

        yield MassExtension(shape)
    if config.logits_processors and shape.samples:
        from jaxengine.runner.extensions.logits_processors import ProcessorsExtension

        yield ProcessorsExtension(shape)
    if config.kv_offloading_bytes:
        from jaxengine.runner.extensions.offload import OffloadExtension

        yield OffloadExtension(shape)
    if config.record_steps is not None:
        from jaxengine.runner.extensions.recording import RecordingExtension

        yield RecordingExtension(shape)


def _poolers(shape: StageShape) -> Iterator[DeviceExtension]:
    """Yield the DeviceExtensions of a pooling model: one for prompts, and one for tokens if the pooler has tasks about
    tokens.
    """
    pooler = shape.model.config.pooler
    assert pooler is not None
    if pooler.splade is not None:
        from jaxengine.runner.extensions.pooling.sparse_pooling import SparsePoolingExtension as PoolingExtension
    else:
        from jaxengine.runner.extensions.pooling.pooling import PoolingExtension
    yield PoolingExtension(shape)
    if pooler.answers_tokens:
        from jaxengine.runner.extensions.pooling.token_pooling import TokenPoolingExtension

        yield TokenPoolingExtension(shape)


def _tower_extensions(shape: StageShape) -> Iterator[DeviceExtension]:
    """Yield the extensions for the model's encoder tower: CrossedPictures for one `by_place`; Sounds, and Alignment if
    it `aligns`, for another that `crosses`; else, also for embeddings in requests, Pictures. None without either.
    """
    tower = shape.model.config.tower
    if tower is not None and tower.by_place:
        from jaxengine.runner.extensions.pictures.crossed_pictures import CrossedPicturesExtension

        yield CrossedPicturesExtension(shape)
    elif tower is not None and tower.crosses:
        from jaxengine.runner.extensions.sounds.section import SoundsExtension

        yield (sounds := SoundsExtension(shape))
        if tower.aligns:
            from jaxengine.runner.extensions.sounds.alignment import AlignmentExtension

            yield AlignmentExtension(shape, sounds.encoder.rows)
    elif shape.config.num_encoder_rows:
        from jaxengine.runner.extensions.pictures.section import PicturesExtension

        yield PicturesExtension(shape)


def step_programs(model: CausalLM, config: ResolvedConfig, platform: Platform, mesh: Mesh) -> StepPrograms:
    """Return the programs of a model, or of one of its stages, with the extensions that its config enables.

    model: abstract, built for the mesh. config: resolved for the platform.
    """
    shape = StageShape(model, config, platform, mesh)
    return StepPrograms(shape, tuple(extensions_of(shape)))
