"""`jaxengine check` finds what makes a step slow; where a target's compiler is installed."""

from __future__ import annotations

import pytest

from jaxengine.check.targets import find_target, require_compiler
from jaxengine.config.engine_config import ConfigError
from tests.jaxengine.check.seeded_faults import FAULTS, faulty_source, judgement


@pytest.mark.parametrize("name", FAULTS)
def test_the_pattern_occurs_once(name):
    compile(faulty_source(FAULTS[name]), FAULTS[name].file, "exec")


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_fault_is_found(name):
    fault = FAULTS[name]
    try:
        require_compiler(find_target(fault.target))
    except ConfigError as error:
        pytest.skip(str(error))
    assert judgement(fault) is not None
