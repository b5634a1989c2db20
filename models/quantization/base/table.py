"""Table, for display, of the storage and the products of a model's matrices: a row for each kind of module."""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.declare import DeclaredParam, declared_params
from jaxengine.models.quantization.base.quantized import VALUES, Quantized
from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.quantized import product_of
from jaxengine.pallas_kernels.registry import kernel_module

_AS_IS = "as it is"
_LOOKED_UP = "none: rows are looked up"


def weight_rows(models: list[Any], platform: str, *, prefix: str = "") -> list[dict[str, Any]]:
    """Return the rows of the table of weights and their storage, in the order of the model. The same module of all
    layers that store it in one format is one row. Biases and other arrays that are no weights are not counted.

    models: the abstract models of the stages, in order. platform: a row of the kernel registry. prefix: added to the
    modules' names. The keys of a row are modules, format (the checkpoint's, or the one to which it is rounded), dtype,
    bytes (of the entire model, scales included), product (the kernel module that multiplies with the weight, if any,
    with a reason if that is not the platform's kernel) and activations (rounding of the rows).
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    build = models[0].build
    codes: DeclaredParam | None = None
    for param in (param for model in models for param in declared_params(model)):
        name, _, kind = ".".join("*" if isinstance(part, int) else str(part) for part in param.path).rpartition(".")
        if kind not in ("values", "codes", "scales", "zeros", "order", "input_scale"):
            continue
        module, _, tensor = param.decl.sources[0].name.rpartition(".")
        scheme = build.scheme(module)
        stored = scheme.stored if isinstance(scheme, Quantized) and kind != "values" else None
        kept = _AS_IS if stored is None else stored.format
        if isinstance(scheme, Quantized) and tensor == VALUES:
            kept = f"{scheme.stored.format}, dequantised"
        op = "matmul" if stored is None else "quantized_matmul"
        op = op if param.decl.num_experts is None else op.replace("matmul", "grouped_matmul")
        # Matrices of latent attention, stacked by head, are multiplied by plain XLA on all platforms.
        of_heads = param.decl.row_major and not param.decl.transposed and param.decl.axes[0] == "heads"
        row = rows.setdefault(
            (name, kept),
            {
                "modules": name.removesuffix(".weight"),
                "format": kept,
                "dtype": "",
                "bytes": 0,
                "product": "matmul.batched" if of_heads else kernel_module(op, platform),
                "activations": _AS_IS if stored is None or stored.activation is None else str(stored.activation),
            },
        )
        row["bytes"] += param.num_bytes
        if kind in ("values", "codes"):
            row["dtype"] = str(param.dtype) if stored is None else stored.dtype
            codes = param
        if kind == "scales":
            assert codes is not None, "codes come before their scales"
            *_, count, out = build.mesh.part_of(param.shape, param.decl.axes)
            size = build.mesh.part_of(codes.shape, codes.decl.axes)[-2 if codes.decl.transposed else -1]
            op = op if codes.decl.transposed else "quantized_table_matmul"
            inputs = size * per_byte(codes.dtype)
            row["product"] = product_of(op, platform, inputs, out, count, codes.dtype, build.dtype)
        elif op == "grouped_matmul":
            *_, size, out = build.mesh.part_of(param.shape, param.decl.axes)
            row["product"] = product_of(op, platform, size, out, 1, param.dtype, build.dtype)
    for row in rows.values():
        if row["modules"] == "embed" and not _multiplies_with_table(models[0].config):
            row["product"] = _LOOKED_UP
        row["modules"] = prefix + row["modules"]
    return list(rows.values())


def _multiplies_with_table(config: ModelConfig) -> bool:
    """Return whether logits, or the scores of some tokens, are computed with the token table."""
    classifier = None if config.pooler is None else config.pooler.classifier
    scores = config.pooler is None or (classifier is not None and bool(classifier.token_ids))
    return config.tie_word_embeddings and scores


def weight_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `weight_rows` formatted as text, followed by a line with the bytes of each dtype in MiB; "" if
    all are plain.
    """
    if all(row["format"] == _AS_IS for row in rows):
        return ""
    shown = [(*map(str, row.values()),) for row in ({**row, "bytes": f"{row['bytes']:,}"} for row in rows)]
    shown.insert(0, tuple(rows[0]))
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in shown]
    by_dtype = {row["dtype"]: 0 for row in rows}
    for row in rows:
        by_dtype[row["dtype"]] += row["bytes"]
    return "\n".join([*lines, "  " + ", ".join(f"{dtype} {size / 2**20:,.1f} MiB" for dtype, size in by_dtype.items())])
