"""Choice of the matrices of a GGUF file that stay quantised, and of the form in which a device holds each.

Formats are per tensor, and files mix them: matrices that are one product here (q, k and v; gate and up) are held in a
form that fits all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from jaxengine.models.build import Build
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.params.declare import declared_params
from jaxengine.models.quantization.base.plain import Plain
from jaxengine.models.quantization.base.rules import Everywhere, Quantization
from jaxengine.models.quantization.schemes.gguf import METHOD, Blocks
from jaxengine.models.weights.gguf.dequant import BlockFormat
from jaxengine.models.weights.views.parts import tensor_name

# Suffix that marks matrices that a scheme may store: routers and the like have none.
_MARK = ".kept"
_MARKED = Everywhere(Plain(_MARK[1:]), with_tables=True)


def read_formats(
    formats: Mapping[str, BlockFormat], build: Callable[[Build], CausalLM], *, keep_tables: bool
) -> tuple[Quantization, frozenset[str]]:
    """Return the quantization of a file's matrices, and the names of the modules that stay quantised (arguments of
    GGUFFile.keep).

    A product stays quantised if all of its matrices are quantised in the file, except for matrices of heads in a stack,
    and for those that a token table shares, such as a tied head, unless keep_tables is True.

    Args:
      formats: block format of each quantised matrix, by its module.
      build: function that returns the file's abstract model for a Build.
      keep_tables: whether token tables stay quantised, too.
    """
    products: dict[tuple[str, ...], tuple[str, ...]] = {}
    tables: set[str] = set()
    for param in declared_params(build(Build("float32", scheme=_MARKED))):
        sources = [source for source in param.decl.sources if source.name.endswith(_MARK)]
        experts = range(param.decl.num_experts or 1)
        every = tuple(tensor_name(source, n).removesuffix(_MARK) for source in sources for n in experts)
        if not param.decl.transposed and not (keep_tables and param.decl.axes[0] == "vocab"):
            tables.update(every)
        elif sources:
            products[tuple(source.name.removesuffix(_MARK).replace("{expert}", "0") for source in sources)] = every
    rules: dict[Blocks, list[str]] = {}
    kept: set[str] = set()
    for names, every in products.items():
        if tables.isdisjoint(every) and formats.keys() >= set(every):
            rules.setdefault(_common([formats[name] for name in every]), []).extend(names)
            kept.update(every)
    named = tuple((tuple(names), stored) for stored, names in rules.items())
    return Quantization(METHOD, named, with_tables=keep_tables), frozenset(kept)


def _common(formats: Sequence[BlockFormat]) -> Blocks:
    """Return the storage format that fits matrices of all of these block formats: int4 codes if all have four bits,
    otherwise int8; the greatest common divisor of their groups; zeros if any has them.
    """
    dtype = "int4" if all(form.four_bits for form in formats) else "int8"
    has_zeros = any(form.has_zeros for form in formats)
    names = " + ".join(sorted({form.name for form in formats}))
    return Blocks(names, dtype, math.gcd(*(form.group for form in formats)), has_zeros)
