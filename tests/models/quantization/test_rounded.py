"""Plain checkpoints rounded as they are read: how far weights move, and that nothing but scale and code decides."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.base.stored import StoredModule
from jaxengine.models.quantization.registry import ROUNDED
from tests.models.weights.test_load import ArraySource

# Relative errors that normally distributed weights must have (root of the mean square): a step of 1 / 127 of the
# largest of 1000, 3.24, over sqrt(12); 2^-4 / sqrt(12) of e4m3's mantissa, on average over an octave; a step of 1 / 15
# of the range of 128, 5.3, over sqrt(12). And room on both sides.
ERRORS = {"int8": 0.0074, "fp8": 0.0264, "int4": 0.101}


@pytest.mark.parametrize("name", ERRORS)
def test_error_of_normal_weights(name):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 1000), np.float32)
    weight[3] = 0
    stored = ROUNDED[name]
    module = StoredModule(ArraySource({"m.weight": weight}), "m", weight.shape, {"m.weight"})
    codes = stored.codes(module, slice(None), slice(None)).astype(np.float32)
    scales, zeros = stored.scales(module, slice(None))
    group = stored.group or 1000
    values = codes * np.repeat(scales, group, axis=1)[:, :1000]
    values = values if zeros is None else values - np.repeat(zeros, group, axis=1)[:, :1000]
    error = np.sqrt(np.mean((values - weight) ** 2) / np.mean(weight**2))
    assert 0.92 * ERRORS[name] < error < 1.08 * ERRORS[name]
    assert not values[3].any() and np.isfinite(values).all()
    part = stored.codes(module, slice(5, 9), slice(128, 300)).astype(np.float32)
    np.testing.assert_array_equal(part, codes[5:9, 128:300])
    np.testing.assert_array_equal(stored.scales(module, slice(5, 9))[0], scales[5:9])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ERRORS)
def test_what_is_no_number_is_not_rounded_to_one(name, value):
    weight = np.ones((4, 256), np.float32)
    weight[2, 200] = value
    module = StoredModule(ArraySource({"m.weight": weight}), "m", weight.shape, {"m.weight"})
    for read in (
        lambda: ROUNDED[name].codes(module, slice(None), slice(None)),
        lambda: ROUNDED[name].scales(module, slice(None)),
    ):
        with pytest.raises(ModelFileError, match="holds a value that is not a finite number.*at m.weight"):
            read()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ERRORS)
def test_weights_of_which_a_step_is_no_number_of_float32_are_zeros(name):
    weight = np.full((2, 256), 1e-45, np.float32)
    module = StoredModule(ArraySource({"m.weight": weight}), "m", weight.shape, {"m.weight"})
    scales, zeros = ROUNDED[name].scales(module, slice(None))
    assert (scales == 1).all() and (zeros is None or np.isfinite(zeros).all())
    assert np.isfinite(ROUNDED[name].codes(module, slice(None), slice(None)).astype(np.float32)).all()
