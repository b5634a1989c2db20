"""Products of few rows as machine code against float64; what they refuse; the same bits whatever runs beside them."""

from __future__ import annotations

import ctypes
import importlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.pallas_kernels import registry
from jaxengine.pallas_kernels.matmul.cpu import quantized as quantized_cpu
from jaxengine.pallas_kernels.matmul.native import dense, product, quantized, quantized_table
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.native import library
from jaxengine.pallas_kernels.registry import NATIVE_ROOMS
from jaxengine.runner.executables import cache
from jaxengine.runner.executables.kept import KeptCode
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.pallas_kernels import reference
from tests.pallas_kernels.machine_code import narrow, without_dots
from tests.pallas_kernels.matmul.test_quantized import error, matrix_of, stored
from tests.pallas_kernels.xla_stand_in import Fenced, StandIn
from tests.tables import each_row

IMPLEMENTATIONS = {quantized.quantized_matmul, quantized_table.quantized_table_matmul, dense.matmul}
ERROR = 2e-6  # relative root of the mean square
# Rows, inputs, outputs, scales along the inputs, codes, whether there are zeros, dtypes of rows and scales, whether the
# matrix is a table.
CASES = [
    (1, 96, 128, 3, "uint8", True, "float32", "float32", False),
    (7, 256, 192, 2, "uint8", False, "float32", "float32", False),  # 4, 2 and 1 rows; two panels of a group
    (3, 64, 64, 4, "int8", True, "bfloat16", "bfloat16", False),
    (5, 96, 320, 1, "int8", False, "bfloat16", "float32", False),
    (7, 320, 1024, 10, "uint8", True, "float32", "bfloat16", False),  # several blocks
    (2, 36, 64, 3, "int8", True, "float32", "float32", False),  # groups of 12, which have no vectors of 8: XLA
    (2, 64, 96, 2, "uint8", False, "float32", "float32", False),  # half a tile: XLA
    (5, 80, 128, 1, "bfloat16", False, "bfloat16", "float32", False),
    (7, 128, 192, 4, "uint8", True, "float32", "float32", True),
    (3, 96, 704, 6, "int8", True, "bfloat16", "bfloat16", True),  # several blocks
    (5, 128, 64, 2, "uint8", False, "bfloat16", "float32", True),  # two vectors of a group
    (1, 80, 128, 1, "bfloat16", False, "bfloat16", "float32", True),
    (2, 64, 128, 4, "uint8", False, "float32", "float32", True),  # groups of half a vector: XLA
    (5, 48, 2304, 1, "bfloat16", False, "bfloat16", "float32", False),  # several strips of columns
    (13, 96, 192, 1, "bfloat16", False, "bfloat16", "float32", False),  # 6 rows twice and 1 row; one panel
    (4, 320, 1152, 1, "bfloat16", False, "bfloat16", "float32", False),  # five panels of words; several strips
    (11, 320, 1152, 1, "bfloat16", False, "bfloat16", "float32", False),  # 6, 4 and 1 rows
    (9, 160, 704, 1, "bfloat16", False, "bfloat16", "float32", True),  # 6, 2 and 1 rows; panels of a table
    (3, 192, 1152, 1, "float32", False, "float32", "float32", False),
    (14, 192, 1152, 1, "float32", False, "float32", "float32", False),
    (14, 80, 128, 1, "float32", False, "float32", "float32", False),  # no panel of 32 inputs: XLA
    (5, 96, 128, 1, "float32", False, "float32", "float32", True),  # XLA
    (111, 64, 192, 1, "bfloat16", False, "bfloat16", "float32", False),  # rows in two blocks
]
XLA = (5, 6, 12, 20, 21)  # of CASES


def check(case) -> None:
    """Compare a case with float64, and each of its rows alone and without the last ones, to the bit."""
    with pytest.MonkeyPatch.context() as patch:
        # All handlers run here: without AVX-512's products of bfloat16 those of words widen them.
        patch.setattr(product, "has_feature", lambda name: name != "amx-bf16")
        _check(case)


def _check(case) -> None:
    rows, size, out, num_scales, codes, zeros, dtype, held, table = case
    rng = np.random.default_rng(rows * size)
    x = jnp.asarray(rng.standard_normal((rows, size)) + 0.3, dtype)
    if codes == dtype:
        weight = jnp.asarray(rng.standard_normal((size, out)), dtype)
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
        multiply = partial(dense.matmul, weight=weight.T if table else weight, contract=int(table))
    else:
        values, *parts = matrix_of(rng, size, out, num_scales, codes, zeros)
        parts = [None if part is None else part.astype(held) for part in parts]
        matrix = [None if part is None else np.asarray(part, np.float64) for part in (values, *parts)]
        exact = reference.quantized_matmul(np.asarray(x, np.float64), *matrix)
        options = {"dtype": jnp.dtype(dtype), "out_dtype": jnp.dtype(jnp.float32)}
        options |= dict(zip(("codes", "scales", "zeros"), (stored(values, codes), *parts), strict=True))
        if table:
            options["codes"] = options["codes"].T
            multiply = partial(quantized_table.quantized_table_matmul, **options)
        else:
            own = [options.pop(name) for name in ("codes", "scales", "zeros")]
            multiply = lambda x: quantized.quantized_matmul(QuantizedOperands(x, None, *own), **options)  # noqa: E731

    got = np.asarray(jax.jit(multiply)(x))
    assert (got.dtype, got.shape) == (np.float32, (rows, out))
    assert error(got, exact) < ERROR, case
    if CASES.index(case) not in XLA:
        few = 2 if table and codes == "bfloat16" and rows > 1 else 1  # a single row of a table has a handler of its own
        np.testing.assert_array_equal(jax.jit(multiply)(x[-few:])[-1], got[-1])
        np.testing.assert_array_equal(jax.jit(multiply)(x[: rows // 2 + 1]), got[: rows // 2 + 1])


def test_against_float64(machine_code):
    assert machine_code.startswith("llvmlite")
    for case in CASES:
        check(case)


def test_what_is_left_to_xla(machine_code, monkeypatch):
    """Kinds and shapes without a handler, and more rows than pay."""
    codes, scales = jnp.zeros((64, 128), jnp.int8), jnp.zeros((2, 128))
    wide, half = codes.astype("float32"), codes.astype("bfloat16")
    few, many = product.few_rows_product, product.many_rows_product
    left = {
        "rows": lambda: few(jnp.zeros((200, 64)), codes, scales),
        "float8": lambda: few(jnp.zeros((1, 64)), codes.astype("float8_e4m3fn"), scales),
        "float16": lambda: few(jnp.zeros((1, 64)), codes.astype("float16")),
        "float16 scales": lambda: few(jnp.zeros((1, 64)), codes, scales.astype("float16")),
        "columns": lambda: few(jnp.zeros((1, 64)), codes[:, :96], scales[:, :96]),
        "no rows": lambda: few(jnp.zeros((0, 64)), codes, scales),
        "no inputs": lambda: few(jnp.zeros((1, 0)), codes[:0], scales, scales),
        "no outputs": lambda: few(jnp.zeros((1, 64)), codes[:, :0], scales[:, :0]),
        "a row and a table of float32": lambda: few(jnp.zeros((1, 128)), wide, is_table=True),
        "inputs of float32": lambda: few(jnp.zeros((1, 48)), wide[:48]),
        "many rows and a table of float32": lambda: many(jnp.zeros((9, 128)), wide, is_table=True),
        "many inputs": lambda: many(jnp.zeros((9, 48)), wide[:48]),
        "many columns": lambda: many(jnp.zeros((9, 64)), wide[:, :96]),
        "many, without rows": lambda: many(jnp.zeros((0, 64)), wide),
        "many, without outputs": lambda: many(jnp.zeros((9, 64)), wide[:, :0]),
    }
    assert {name for name, of in left.items() if of() is not None} == set()
    assert few(jnp.zeros((1, 64)), codes, scales) is not None
    assert few(jnp.zeros((1, 64)), wide) is not None and many(jnp.zeros((9, 64)), wide) is not None
    for features, runs in (({"avx512bf16"}, True), (set(), False), ({"avx512bf16", "amx-bf16"}, False)):
        monkeypatch.setattr(product, "has_feature", features.__contains__)
        assert (many(jnp.zeros((9, 64), "bfloat16"), half) is not None) is runs


def test_rows_that_are_no_numbers_stay_alone(machine_code):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32).at[1, 5].set(jnp.nan)
    y = np.asarray(product.few_rows_product(x, jnp.ones((64, 64), jnp.int8), jnp.ones((2, 64)), jnp.ones((2, 64))))
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_width_of_vectors_and_number_of_blocks_change_no_bits(machine_code):
    """The code for a processor without AVX-512, and columns in any number of blocks."""
    from jaxengine.pallas_kernels.matmul.native.sums import JOB

    engines = [narrow(), library.made(NATIVE_ROOMS)[1]]
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((7, 64)), "scales": rng.random((2, 256)), "zeros": rng.random((2, 256))}
    arrays = {name: own.astype(np.float32) for name, own in arrays.items()}
    arrays["sums"] = arrays["x"].reshape(7, 2, 32).sum(axis=2)
    numbers = {"rows": 7, "inputs": 64, "outputs": 256, "panels": 2, "each": 1}
    kinds = ("pairs", 2), ("int8", 1), ("bfloat16", 1), ("float32", 1), ("pairs_table", 2), ("int8_table", 1)
    for kind, per_line in kinds:
        arrays["matrix"] = rng.integers(0, 63, (64, 1024), np.uint8)  # enough for each, and finite
        found = []
        for engine, width in [(engines[0], 256), (engines[1], 256), (engines[1], 64), (engines[1], 192)]:
            arrays["y"] = np.full((7, 256), np.nan, np.float32)
            fields = numbers | {"panel": 32 // per_line, "width": width, "blocks": -(-256 // width)}
            fields |= {name: own.ctypes.data for name, own in arrays.items()}
            job = (ctypes.c_int64 * len(JOB.fields))(*(fields.get(name, 0) for name in JOB.fields))
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address(f"{kind}_rows"))(ctypes.addressof(job))
            found.append(arrays["y"])
        assert np.isfinite(found[0]).all()
        for each in found[1:]:
            np.testing.assert_array_equal(each, found[0])


def test_width_of_vectors_and_number_of_blocks_change_no_bits_of_many_rows(machine_code):
    """Columns and rows in any number of blocks, which have two strips or one."""
    from jaxengine.pallas_kernels.matmul.native_rows.code import HANDLERS, JOB

    engines = [narrow(), without_dots()]
    rng = np.random.default_rng(0)
    for handler, kind in HANDLERS.items():
        words = rng.standard_normal((2, 160 * 640), np.float32)
        arrays = {"x": words[0], "matrix": words[1]}
        if kind.per_word == 2:
            arrays = {name: (own.view(np.uint32) >> 16).astype(np.uint16) for name, own in arrays.items()}
        found = []
        for engine, width, height in [
            (engines[0], 640, 15),
            (engines[1], 640, 15),
            (engines[1], 64, 6),
            (engines[1], 192, 8),
        ]:
            arrays["y"] = np.full((15, 640), np.nan, np.float32)
            fields = {"rows": 15, "inputs": 160, "outputs": 640, "panel": 32 // kind.per_word}
            columns = -(-640 // width)
            fields |= {"width": width, "columns": columns, "height": height, "blocks": columns * -(-15 // height)}
            fields |= {name: own.ctypes.data for name, own in arrays.items()}
            job = (ctypes.c_int64 * len(JOB.fields))(*(fields.get(name, 0) for name in JOB.fields))
            address = engine.get_function_address(f"{handler}_blocks")
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(job))
            found.append(arrays["y"])
        assert np.isfinite(found[0]).all()
        for each in found[1:]:
            np.testing.assert_array_equal(each, found[0])


# Handler, rows, inputs and outputs of fenced operands.
FENCED = [
    *(("int8", 3, 34, 64), ("pairs", 5, 48, 192), ("bfloat16", 1, 7, 128), ("float32", 3, 96, 64)),
    *(("dots", 2, 160, 128), ("int8_table", 6, 48, 64), ("pairs_table", 3, 96, 128), ("bfloat16_table", 1, 80, 192)),
    *(("many_float32", 13, 96, 320), ("many_bfloat16", 49, 160, 320), ("many_bfloat16_table", 150, 64, 64)),
]


@each_row(("handler", "rows", "inputs", "outputs"), FENCED)
def test_handlers_stay_within_their_operands(machine_code, handler, rows, inputs, outputs):
    """On operands of any alignment, and when threads of the pool come late, when it has none, and when it fails."""
    kind, is_table = handler.removeprefix("many_").removesuffix("_table"), handler.endswith("_table")
    x_type = jnp.bfloat16 if kind == "dots" or handler.startswith("many_bf") else np.float32
    rng, operands = np.random.default_rng(rows), []
    if kind in ("int8", "pairs"):
        codes = rng.integers(-8, 8, (inputs, outputs), np.int8)
        matrix = codes if kind == "int8" else (codes[0::2] & 15 | codes[1::2] << 4).view(np.uint8)
        operands = [rng.standard_normal((1, outputs)).astype(np.float32)]
        wide = codes * operands[0].astype(np.float64)
    else:
        matrix = rng.standard_normal((inputs, outputs)).astype(np.float32 if kind == "float32" else jnp.bfloat16)
        wide = matrix.astype(np.float64)
    x = rng.standard_normal((rows, inputs)).astype(x_type)
    exact = x.astype(np.float64) @ wide
    x = x.reshape(rows, -1, 16, 2).swapaxes(2, 3).reshape(x.shape) if handler == "pairs_table" else x
    operands = [x, np.ascontiguousarray(matrix.T) if is_table else matrix, *operands]
    address = library.made(NATIVE_ROOMS)[1].get_function_address(handler)
    for at_end, threads, schedule in (
        *((True, 64, "late"), (True, 1, "now"), (False, 3, "error")),
        *((True, 5, "now"), (False, 4, "thread"), (True, 0, "now")),
    ):
        fenced, xla = Fenced(), StandIn(threads, schedule, counts=threads > 0)
        copies = [fenced.copy(own, at_end=at_end) for own in operands]
        y = fenced.copy(np.full(exact.shape, np.nan, np.float32), at_end=at_end)
        xla.call(address, copies, y)
        assert error(y, exact) < ERROR
        y[...] = np.nan
        xla.finish()
        assert np.isnan(y).all()  # a late task finds nothing to do


def test_only_a_metadata_extension_asks_for_the_version(machine_code):
    x, matrix, y = np.ones((1, 32), np.float32), np.ones((32, 64), np.float32), np.zeros((1, 64), np.float32)
    StandIn(1, "now").call(library.made(NATIVE_ROOMS)[1].get_function_address("float32"), [x, matrix], y, extension=2)
    assert (y == 32).all()


def test_an_unfit_llvmlite_is_named(machine_code, monkeypatch, caplog):
    """One that numba has brought, and one whose own library cannot be loaded."""
    import llvmlite
    import llvmlite.binding as llvm

    def unloadable() -> str:
        raise OSError("Could not find/load shared object file 'libllvmlite.so'")

    monkeypatch.setattr(library, "_made", {})
    with caplog.at_level("INFO", library.__name__):
        with monkeypatch.context() as patch:
            patch.setattr(llvmlite, "__version__", "0.43.0")
            assert library._load(NATIVE_ROOMS) == ""
        with monkeypatch.context() as patch:
            patch.setattr(llvm, "get_host_cpu_name", unloadable)
            assert library._load(NATIVE_ROOMS) == ""
    assert "llvmlite has version 0.43.0, allowed: 0.46 and later" in caplog.text and "libllvmlite.so" in caplog.text


def test_features_without_the_one_they_extend_are_not_used(machine_code, monkeypatch):
    """LLVM ends the process where it is to multiply bfloat16 without AVX-512."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    for name in ("avx2", "avx512bf16", "avx512vl"):
        features[name] = True
    features["avx512f"] = False
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    assert library.host_features()["avx2"] and not library.has_feature.__wrapped__("avx512bf16")
    assert "+avx512" not in library.host_features().flatten()


def test_another_ffi_or_processor_is_named(tmp_path, monkeypatch, caplog):
    """A header of jaxlib's with another layout is not used, and the log says what differs."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    assert library.ffi_abi(header)["major"] == 0
    (tmp_path / "renamed.h").write_text(text.replace("XLA_FFI_Extension_Base", "XLA_FFI_InternalExtension"))  # jax 0.12
    assert library.ffi_abi(tmp_path / "renamed.h") == library.ffi_abi(header)
    changes = {
        "XLA_FFI_Buffer": ("  void* data;\n  int64_t rank;", "  int64_t rank;\n  void* data;"),
        "has version": ("#define XLA_FFI_API_MAJOR 0", "#define XLA_FFI_API_MAJOR 1"),
        "XLA_FFI_ThreadPool_Schedule": ("_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_ThreadPool_Schedule);", ""),
        "EXECUTE": ("XLA_FFI_ExecutionStage_EXECUTE = 3", "XLA_FFI_ExecutionStage_EXECUTE = 4"),
        "cannot be read": None,
    }
    for named, change in changes.items():
        other = tmp_path / "c_api.h"
        other.unlink(missing_ok=True)
        if change is not None:
            assert text.count(change[0]) == 1, named
            other.write_text(text.replace(*change))
        with pytest.raises(library.UnfitError, match=named):
            library.ffi_abi(other)
    monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(library, "_made", {})
    with caplog.at_level("INFO", library.__name__):
        assert library._load(NATIVE_ROOMS) == ""
    assert "the processor is riscv64, allowed: x86_64" in caplog.text
    assert registry.kernel("quantized_matmul", "cpu") is quantized_cpu.quantized_matmul


class Store(dict):
    """library.CodeStore in memory."""

    read, write = dict.get, dict.__setitem__


def test_code_that_is_kept_is_not_compiled_again(machine_code, monkeypatch):
    import llvmlite.binding as llvm

    store, features = Store(), library.host_features()
    processor = llvm.get_host_cpu_name(), features
    assert library.compiled(NATIVE_ROOMS, *processor, store)[0] == machine_code and len(store) == len(NATIVE_ROOMS)

    def refuse(*_):
        raise RuntimeError("compiled")

    monkeypatch.setattr(library, "_object_code", refuse)
    about, engine = library.compiled(NATIVE_ROOMS, *processor, store)
    assert about == machine_code
    for room in NATIVE_ROOMS:
        importlib.import_module(f"{room}.check").check(engine.get_function_address)
        for handler in importlib.import_module(f"{room}.code").HANDLERS:
            assert engine.get_function_address(handler)
    # Code for another processor, by another compiler, or with another FFI is not taken.
    with pytest.raises(RuntimeError, match="compiled"):
        library.compiled(NATIVE_ROOMS, "haswell", features, store)
    features["avx512vnni"] = not features.get("avx512vnni")
    with pytest.raises(RuntimeError, match="compiled"):
        library.compiled(NATIVE_ROOMS, *processor, store)
    features["avx512vnni"] = not features["avx512vnni"]
    abi = library.ffi_abi(Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h")
    for name, other in (("llvm_version_info", (0, 0, 0)), ("ffi_abi", lambda _: abi | {"minor": 99})):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="compiled"):
            patch.setattr(llvm if name.startswith("llvm") else library, name, other)
            library.compiled(NATIVE_ROOMS, *processor, store)


def test_an_engine_computes_with_it(machine_code, tmp_path, monkeypatch):
    """Tokens are plain XLA's, alone and in a batch; kept programs load again; nothing compiles after the start. What is
    kept of machine code is found at the next start, and only beside the same code of a user's.
    """
    options = TINY_OPTIONS | {"quantization": "int8", "max_model_len": 64, "block_size": 16}  # attention's, too
    prompts = [{"prompt_token_ids": [3 + n, 5, 7 * n + 2][: 1 + n]} for n in range(3)]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    tokens, loaded, found = [], [], []

    def native_code(store=None) -> str:
        if store is not None:
            found.append((store.read(("facts",)), KeptCode(store._files, "changed").read(("facts",))))
            store.write(("facts",), b"code")
        return registry.native_code(store)

    monkeypatch.setattr(cache, "native_code", native_code)
    for text in ("", machine_code, machine_code):
        monkeypatch.setattr(library, "load", lambda rooms, store, text=text: text)
        monkeypatch.setattr(registry, "_BUILT", set())
        cache._environment.cache_clear()
        llm = LLM(str(TINY_CHECKPOINT), **options, **({"compile_cache_dir": str(tmp_path)} if text else {}))
        row = {row["modules"]: row["product"] for row in llm.core.utility("weights")}["layers.*.mlp.down"]
        assert row == ("matmul.native.quantized" if text else "matmul.cpu.quantized")
        alone = [llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        crowd = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
        assert alone == crowd
        tokens.append(alone)
        caches = [own for stage in llm.core.runner.stages for own in stage.caches]
        loaded.append((sum(own.num_compiled for own in caches), sum(own.num_loaded for own in caches)))
        assert {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}["jaxengine:compilations_since_ready"] == 0
        llm.core.shutdown()
    cache._environment.cache_clear()
    assert tokens[0] == tokens[1] == tokens[2]
    assert loaded[1][0] and not loaded[2][0], loaded
    assert found[-2:] == [(None, None), (b"code", None)]
