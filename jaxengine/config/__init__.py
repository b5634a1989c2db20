"""Engine options and their checks, and the defaults of each kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxengine import vllm_names

if TYPE_CHECKING:
    from jaxengine.config.compilation_config import CompilationConfig as CompilationConfig
    from jaxengine.config.compilation_config import CompilationLevel as CompilationLevel
    from jaxengine.config.compilation_config import CompilationMode as CompilationMode
    from jaxengine.config.pooler_config import PoolerConfig as PoolerConfig
    from jaxengine.config.speculation import SpeculativeConfig as SpeculativeConfig
    from jaxengine.config.structured_outputs_config import StructuredOutputsConfig as StructuredOutputsConfig
else:
    __getattr__ = vllm_names.look_up(__name__)
