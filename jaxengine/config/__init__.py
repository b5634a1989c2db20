"""Engine options and their checks, and the defaults of each kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxengine import vllm_names

if TYPE_CHECKING:
    from jaxengine.config.execution.compilation_config import CompilationConfig as CompilationConfig
    from jaxengine.config.execution.compilation_config import CompilationLevel as CompilationLevel
    from jaxengine.config.execution.compilation_config import CompilationMode as CompilationMode
    from jaxengine.config.features.pooler_config import PoolerConfig as PoolerConfig
    from jaxengine.config.features.speculation import SpeculativeConfig as SpeculativeConfig
    from jaxengine.config.features.structured_outputs_config import StructuredOutputsConfig as StructuredOutputsConfig
else:
    __getattr__ = vllm_names.look_up(__name__)
