"""Cases of products: with plain, quantised and grouped matrices, with adapters, and of microscaled rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.matmul.gated import activated, biased
from jaxengine.pallas_kernels.matmul.lora import lora_visits
from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.proof.calls import Call
from jaxengine.pallas_kernels.proof.case import Case
from jaxengine.pallas_kernels.proof.random_arrays import normal, typical, uniform
from jaxengine.pallas_kernels.registry import adds_bias, group_kernel, kernel, kernel_kind

# Arguments of implementations, in order: names, and records of several. A bias may be absent.
ARGUMENTS = {
    "matmul": ("x", "w"),
    "grouped_matmul": ("x", "w", "group_sizes", "bias"),
    "gated_matmul": ("x", "w", "group_sizes", "bias"),
    "quantized_matmul": (QuantizedOperands,),
    "quantized_grouped_matmul": (QuantizedOperands, "group_sizes", "bias"),
    "quantized_gated_matmul": (QuantizedOperands, "group_sizes", "bias"),
    "microscaled_rows": ("x", "global_scale"),
}
# Gated products, and the products that they activate.
_GATED = {"gated_matmul": "grouped_matmul", "quantized_gated_matmul": "quantized_grouped_matmul"}


def product_case(call: Call) -> Case:
    """Return the case of a call of one of the operations in ARGUMENTS, on random arguments of its shapes and dtypes.

    The case adds activation and bias itself if the implementation does not. Mixes: "ragged", and for an operation with
    groups also "one" (see `_divide`).
    """
    shapes: dict[str, Any] = {}
    for name, shape in zip(ARGUMENTS[call.op], call.arguments, strict=False):
        shapes |= shape._asdict() if name is QuantizedOperands else {name: shape}

    def run(*arguments: Any) -> Any:
        options = dict(call.options)
        if call.op in _GATED and kernel_kind(call.op, call.platform) is None:
            *operands, group_sizes, bias = arguments
            activation, out_dtype = options.pop("activation"), options["out_dtype"]
            product = kernel(_GATED[call.op], call.platform)
            y = product(*operands, group_sizes, **options | {"out_dtype": jnp.dtype(jnp.float32)})
            return activated(y, group_sizes, bias, activation, out_dtype)
        implementation = kernel(call.op, call.platform)
        if "bias" in shapes and call.op not in _GATED and not adds_bias(call.op, call.platform):
            *operands, group_sizes, bias = arguments
            return biased(implementation(*operands, group_sizes, **options), group_sizes, bias)
        return implementation(*arguments, **options)

    def inputs(mix: str, rng: np.random.Generator) -> tuple[Any, ...]:
        made: dict[str, Any] = {
            name: None if shape is None else _array(name, shape, shapes, rng) for name, shape in shapes.items()
        }
        if "group_sizes" in shapes:
            _divide(made, mix, call.platform, rng)
        if "codes" not in made:
            return tuple(made.values())
        record = QuantizedOperands(**{name: made.pop(name) for name in QuantizedOperands._fields})
        return record, *made.values()

    return Case(run, inputs, ("ragged", "one") if "group_sizes" in shapes else ("ragged",))


def lora_case(call: Call) -> Case:
    """Return the case of a call of `lora_product`: it computes `lora_visits` of the rows' slots, then the product.

    Mixes: "ragged", a random slot or none for each row; "one", the last slot for all rows.
    """
    y, x, a, bs, _ = call.arguments
    rank = call.options["rank"]
    num_rows, num_slots = x.shape[0], bs[0].shape[0] // rank

    def run(*arguments: Any) -> Any:
        *operands, slots = arguments
        visits = lora_visits(slots, num_slots=num_slots, rank=rank)
        return kernel(call.op, call.platform)(*operands, visits, **call.options)

    def inputs(mix: str, rng: np.random.Generator) -> tuple[Any, ...]:
        slots = rng.integers(-1, num_slots, num_rows)
        slots = slots if mix == "ragged" else np.full(num_rows, num_slots - 1)
        matrices = normal(rng, a.shape, a.dtype, a.shape[1] ** -0.5), [normal(rng, b.shape, b.dtype) for b in bs]
        values = normal(rng, y.shape, y.dtype), normal(rng, x.shape, x.dtype)
        return *values, *matrices, jax.device_put(slots.astype(np.int32))

    return Case(run, inputs, ("ragged", "one"))


def _array(name: str, shape: Any, shapes: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return the random argument `name` of a product, of this shape and dtype, scaled so that results are about 1; None
    for group sizes. Scales and zeros are uniformly distributed, others normally.

    shapes: shapes and dtypes of all arguments, by name.
    """
    if name == "group_sizes":
        return None
    if name == "w":
        return normal(rng, shape.shape, shape.dtype, shape.shape[-2] ** -0.5)
    if name in ("scales", "zeros"):
        codes = shapes["codes"]
        inputs = codes.shape[-2] * per_byte(codes.dtype)
        scale = inputs**-0.5 / (4.0 if per_byte(codes.dtype) > 1 else typical(codes.dtype))
        # Zeros are zero points times scales: those of four bits are near 8.
        return uniform(rng, shape.shape, shape.dtype, scale * (8.0 if name == "zeros" else 1.0))
    if name in ("x_scales", "global_scale"):
        return uniform(rng, shape.shape, shape.dtype, 1 / typical(shapes["x"].dtype))
    return normal(rng, shape.shape, shape.dtype)


def _divide(made: dict[str, Any], mix: str, platform: str, rng: np.random.Generator) -> None:
    """Set `group_sizes` in the arguments `made`, in place: random sizes, some of them 0, or for mix "one" all rows in
    one group. On platform "tpu" they are multiples of its group_step. Rows of no group become NaN, unless x holds
    codes.
    """
    x = made["x"]
    num_rows, num_groups = len(x), len(made["w"] if "w" in made else made["codes"])
    # Groups begin at multiples of the step to which code that sorts rows pads them (matmul.grouped.group_step).
    step = group_kernel(platform).group_step(num_rows, num_groups) if platform == "tpu" else 1
    sizes = np.zeros(num_groups, np.int64)
    if mix == "one":
        sizes[num_groups // 2] = num_rows // step * step
    else:
        shares = rng.random(num_groups) * (rng.random(num_groups) < 0.75)
        shares[0] += not shares.any()
        sizes = (shares / shares.sum() * (num_rows - num_rows // 8)).astype(np.int64) // step * step
    made["group_sizes"] = jax.device_put(sizes.astype(np.int32))
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1:
        in_group = jnp.arange(num_rows) < int(sizes.sum())
        made["x"] = jnp.where(in_group[:, None], x, jnp.asarray(jnp.nan, x.dtype))
