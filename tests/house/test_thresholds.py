"""A threshold has a unit, says why it is there and where its value is from: it stands in a table of thresholds."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "aotc").rglob("limits.py"))
ROW = re.compile(r"unit: \S.*\nwhy: \S.*\nfrom: \S.*\n")

# Files whose numbers are no thresholds: the contracts of a format, and facts of ops.
FORMATS = ("aotc/vmfb/abi.py", "aotc/vmfb/isa.py", "aotc/ir/opset")

# Constants that decide nothing by size: (file, name), and what they are.
OTHER = {
    ("aotc/ir/loop/ir.py", "WARP"): "a fact of NVIDIA's GPUs",
    ("aotc/kernels/cuda/templates/gemm/register_operands.py", "_STEPS"): "a fact of wgmma: 8 terms of f32 at a time",
    ("aotc/kernels/cuda/shuffle.py", "_EVERYBODY, _BUTTERFLY, _BALLOT"): "numbers of NVVM's instructions",
    ("aotc/kernels/cpu/tiles/tile_squares.py", "_STEP"): "a fact of panels: two bf16 or four i8",
    ("aotc/kernels/cpu/tiles/tile_function.py", "SIGNS"): "the bits that move i8 to u8",
    ("aotc/kernels/cpu/tiles/tile_words.py", "QUAD"): "a fact of vpdpbusd: four bytes",
    ("aotc/kernels/cpu/tiles/tile_words.py", "_OTHERS"): "how a CPU's registers are shared",
    ("aotc/lowering/regions/attention/cpu_int8_cache.py", "QUAD"): "a fact of vpdpbusd: four bytes",
    ("aotc/lowering/regions/attention/cpu_int8_cache.py", "_LEAST"): "a fact of f32: it has an inverse",
    ("aotc/lowering/regions/attention/cpu_int8_cache.py", "_INFINITE"): "bits of an f32",
    ("aotc/lowering/regions/attention/cpu_int8_cache.py", "_WHOLE"): "a fact of f32: steps of 1",
    ("aotc/lowering/regions/attention/cpu_int8_cache.py", "_WHOLE_BITS"): "bits of an f32",
    ("aotc/lowering/regions/attention/cpu_int8_cache.py", "_SPARE"): "roundings of an f32",
    ("aotc/kernels/emit/bf16_instructions.py", "_LOG2_E"): "a number of mathematics",
    ("aotc/lowering/analysis/access_intervals.py", "_FAR"): "a place that is beyond those of all arrays",
    ("aotc/lowering/regions/loop/gpu_transpose.py", "_PAD"):
    "a word that keeps threads of a warp off each other's banks",
    ("aotc/lowering/passes/parallelize_gpu/exact_float_sums.py", "_COUNT"): "a format of two counts in an integer",
    ("aotc/frontend/importers/random.py", "GOLDEN"): "a number of the algorithm",
    ("aotc/frontend/quantized/products.py", "U8_SHIFT"): "the distance of u8 from i8",
    ("aotc/ir/program/verify.py", "_STRIDES"): "primes that tell symbols apart",
    ("aotc/ir/program/verify.py", "_NOBODY"): "a mark",
    ("aotc/vmfb/devices/interop/dlpack.py", "CPU, PINNED"): "numbers of DLPack",
    ("aotc/vmfb/devices/interop/dlpack.py", "CUDA, MANAGED"): "numbers of DLPack",
    ("aotc/vmfb/devices/interop/dlpack.py", "_READ_ONLY"): "a number of DLPack",
    ("aotc/vmfb/devices/interop/foreign.py", "_LEGACY"): "a number of DLPack and of the interface",
    ("aotc/lowering/placement/min_cut.py", "FIRST, SECOND"): "numbers of the two sides",
    ("aotc/lowering/placement/min_cut.py", "_NEVER"): "a mark: more than all else weighs",
    ("aotc/vmfb/devices/cuda/driver.py", "_ORDINAL"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/array.py", "_WAITS_ITSELF"): "a number of DLPack",
    ("aotc/vmfb/devices/cuda/driver.py", "_PORTABLE"): "CUDA's numbers",
    ("aotc/vmfb/devices/mixed/call.py", "_BLOCK"): "what CUDA's allocations are aligned to",
    ("aotc/vmfb/devices/cuda/driver.py", "_NO_TIMING"): "a number of the CUDA driver",
    ("aotc/kernels/cpu/tiles/amx.py", "ROWS, WORDS, REGISTERS"): "facts of AMX",
    ("aotc/kernels/cpu/tiles/amx.py", "_SUMS"): "how AMX's registers are shared",
    ("cli/shared/tables.py", "_LEAST"): "a width of columns on a terminal",
    ("aotc/vmfb/profile/chrome.py", "PROCESS"): "a number of a process in a trace, which has one",
    ("aotc/vmfb/profile/perf.py", "_SYMBOLS, _RELOCATIONS, _DYNAMIC"): "numbers of ELF",
    ("aotc/vmfb/profile/thunks.py", "ROW_WORDS"): "a format: 128 bytes, for the code shifts",
    ("aotc/vmfb/profile/thunks.py", "MOST_DIMS"): "what is left of a row",
    ("aotc/vmfb/profile/thunks.py", "_STUB"): "the length of machine code",
    ("aotc/vmfb/host/machine.py", "_ARCH_PRCTL, _ASK, _TILE_DATA"): "Linux",
    ("aotc/vmfb/host/machine.py", "_GET_LENGTH, _LENGTH_BYTES"): "Linux",
    ("aotc/kernels/cpu/executor/atomics.py", "CLOCK_MONOTONIC, CLOCK_MONOTONIC_COARSE"): "Linux",
    ("aotc/kernels/cpu/executor/atomics.py", "FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE"): "Linux",
    ("aotc/kernels/cpu/executor/atomics.py", "SIG_SETMASK"): "Linux",
    ("aotc/kernels/cpu/executor/atomics.py", "SIGNAL_SET_WORDS"): "Linux",
    ("aotc/kernels/cpu/executor/claims.py", "PACE_BITS"): "a fixed-point format",
    ("aotc/kernels/cpu/executor/stress.py", "MULTIPLIER, INCREMENT, BITS"): "a generator of random numbers",
    ("aotc/kernels/cpu/executor/stress.py", "SPREAD"): "a generator of random numbers",
    ("aotc/lowering/passes/pack_contractions/signed_bytes.py", "SHIFT"): "a byte's sign",
    ("aotc/kernels/cpu/executor/words.py", "FIRST_RUN"): "the layout of the pool's memory",
    ("aotc/kernels/cpu/executor/words.py", "PARTICIPANT_WORDS"): "the layout of a participant's memory",
    ("aotc/kernels/cpu/executor/words.py", "PART_WORDS"): "the layout of a participant's part",
    ("aotc/kernels/cpu/executor/words.py", "SEATS"): "the layout of a run's memory",
    ("aotc/kernels/cpu/executor/words.py", "SEAT_BITS"): "bits of a word that are used",
    ("aotc/kernels/cpu/executor/words.py", "RUN_WORDS"): "the layout of a run's memory",
    ("aotc/kernels/cpu/executor/words.py", "SECOND"): "nanoseconds",
    ("aotc/kernels/cpu/executor/words.py", "POOL_WORDS"): "the layout of the pool's memory",
    ("aotc/kernels/cpu/executor/words.py", "ALL"): "a mark: wake everybody",
    ("aotc/kernels/cpu/executor/tile_graph.py", "BITS"): "of a word",
    ("aotc/kernels/cpu/executor/tile_graph.py", "MOST_CLAIMS"): "the bits of a cell",
    ("aotc/kernels/cpu/executor/tile_graph.py", "NOTHING"): "a mark",
    ("aotc/vmfb/api/entry.py", "_NOT_KNOWN"): "a mark",
    ("aotc/kernels/cpu/tiles/tile_function.py", "LINE"): "bytes of a cache line",
    ("aotc/ir/loop/forms/quantized.py", "SCALE_BYTES"): "the format of panels",
    ("aotc/kernels/cpu/tiles/tile_scaled.py", "_SPARE"): "how a CPU's registers are shared",
    ("aotc/lowering/passes/quantize_weights.py", "_LANES"): "f32 in the widest vector of a CPU",
    ("aotc/kernels/cuda/ampere.py", "PIECE"): "the format of an instruction",
    ("aotc/kernels/cuda/hopper.py", "_RANK_BITS"): "the form of an address in Python",
    ("aotc/kernels/cuda/templates/gemm/wgmma.py", "_TURN"): "numbers of barriers",
    ("aotc/kernels/cuda/templates/gemm/tiles.py", "SWIZZLE_BYTES"): "the format of tiles in shared memory",
    ("aotc/ir/loop/forms/attention.py", "_TAIL"): "the form of a kernel",
    ("aotc/kernels/cuda/templates/attention/softmax_steps.py", "LOG2_E"): "a number of mathematics",
    ("aotc/kernels/cuda/templates/attention/wgmma.py", "_TURN, _STORE"): "numbers of barriers",
    ("aotc/ir/loop/forms/matmul.py", "TF32_BITS"): "the format of a number",
    ("aotc/ir/loop/forms/matmul.py", "MOST_COORDINATES"): "the format of tensor maps",
    ("aotc/kernels/cuda/templates/gemm/computed_operands.py", "_WORDS"): "the format of tiles in shared memory",
    ("aotc/kernels/cuda/templates/gemm/mma_steps.py", "PIECES"): "the format of tiles in shared memory",
    ("aotc/kernels/cuda/templates/gemm/tiles.py", "CHUNK"): "the format of tiles in shared memory",
    ("aotc/kernels/cuda/templates/gemm/tiles.py", "STAGING"): "the format of tiles in shared memory",
    ("aotc/kernels/cuda/templates/gemm/tiles.py", "ROWS"): "the format of tiles in shared memory",
    ("aotc/kernels/cuda/templates/gemm/tiles.py", "LINE"): "the format of the L2 cache",
    ("aotc/kernels/cuda/dialect.py", "IR_VERSION"): "the format of NVVM IR",
    ("aotc/kernels/cuda/shared_memory.py", "SHARED"): "LLVM's number of an address space",
    ("aotc/kernels/cuda/front_end.py", "_FRONT"): "a compute capability that Numba knows",
    ("aotc/kernels/cuda/nvvm.py", "_AHEAD"): "how versions of PTX are numbered",
    ("aotc/kernels/emit/half.py", "_QUIET, _QUIET_F16"): "the formats of f32 and f16",
    ("aotc/kernels/emit/half.py", "_MAGNITUDE, _INFINITY"): "the format of f32",
    ("aotc/kernels/emit/small_float.py", "_MANTISSA, _BIAS"): "the format of f32",
    ("aotc/kernels/emit/small_float.py", "_MAGNITUDE, _INFINITY, _NAN"): "the format of f32",
    ("aotc/kernels/formulas/erf.py", "_HIGH_WORD"): "a mask",
    ("aotc/kernels/formulas/large_angles.py", "_AHEAD"): "the layout of the table of digits",
    ("aotc/kernels/formulas/large_angles.py", "_WORDS"): "the layout of the table of digits",
    ("aotc/kernels/formulas/software_fma.py", "_MANTISSA, _BIAS"): "the format of f64",
    ("aotc/kernels/formulas/software_fma.py", "_PRODUCT_LEFT, _SUM_LEFT"): "how mantissas lie in 128 bits",
    ("aotc/kernels/formulas/software_fma.py", "_LEAST"): "the format of f64",
    ("aotc/kernels/formulas/forms.py", "LN2_HIGH, LN2_LOW"): "log 2 in two words",
    ("aotc/kernels/formulas/log_gamma.py", "_HALF_LOG_TURN"): "log(2 pi) / 2",
    ("aotc/kernels/formulas/log_gamma_negative.py", "_IN_TWO_WORDS"): "the layout of a series",
    ("aotc/kernels/formulas/rare.py", "_STEP"): "64 bits less the 53 of a significand",
    ("aotc/lowering/plans/cpu_tiles.py", "SLICE_PAD"): "words that keep threads of a warp off each other's banks",
    ("aotc/lowering/regions/sort/gpu_radix.py", "DIGIT_BITS"): "the bits of a byte",
    ("aotc/source/bytecode.py", "_ATTRIBUTES, _ATTRIBUTE_SIZES, _RESOURCES, _RESOURCE_SIZES"): "MLIR's bytecode",
    ("aotc/source/bytecode.py", "_ALIGNED, _SECTION"): "MLIR's bytecode",
    ("aotc/source/bytecode.py", "_PADDING"): "MLIR's bytecode",
    ("aotc/source/record.py", "VERSION"): "the format of a source",
    ("aotc/source/reproducer.py", "_VERSION"): "the format of a reproducer",
    ("aotc/vmfb/arguments.py", "GOOD_FLAGS"): "NumPy's flags",
    ("aotc/tools/sign.py", "KEY_BYTES"): "Ed25519",
    ("aotc/vmfb/weights/safetensors.py", "_LENGTH_BYTES"): "the format of safetensors",
    ("aotc/vmfb/weights/safetensors.py", "_MOST_HEADER_BYTES"): "the format of safetensors",
    ("aotc/vmfb/profile/cost_record.py", "FORMAT"): "the format of a record",
    ("aotc/vmfb/bundle.py", "SIGNED"): "the format of a bundle",
    ("aotc/vmfb/bundle.py", "VERSION"): "the format of a bundle",
    ("aotc/vmfb/bundle.py", "FORMAT"): "the format of a bundle",
    ("aotc/vmfb/bundle.py", "ALIGNMENT"): "the format of a bundle",
    ("aotc/vmfb/devices/cuda/driver.py", "_MAJOR, _MINOR"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/driver.py", "_NON_BLOCKING, _RELAXED"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/driver.py", "_WORDS_BYTES"): "a page of memory",
    ("aotc/vmfb/devices/cuda/libcuda/library.py", "_OUT_OF_MEMORY, _NOT_READY"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/libcuda/graphs.py", "CONDITIONS_SINCE"): "a version of CUDA",
    ("aotc/vmfb/devices/cuda/libcuda/graphs.py", "_CONDITIONAL"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/libcuda/graphs.py", "_WHILE, _SWITCH"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/libcuda/graphs.py", "_DEVICE"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/libcuda/loops.py", "WORD_BYTES"): "a word that the GPU's code reads",
    ("aotc/vmfb/devices/cuda/driver.py", "_MULTIPROCESSORS"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/driver.py", "_DYNAMIC_SHARED"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/launch.py", "_CLUSTER, _COOPERATIVE"): "CUDA's numbers",
    ("aotc/kernels/cuda/grid_barrier.py", "_HIGHEST"): "a bit",
    ("aotc/vmfb/devices/cuda/tensor_map.py", "_PROMOTION"): "CUDA's numbers",
    ("aotc/vmfb/devices/cuda/tensor_map.py", "_MOST_DIMENSIONS"): "the format of a tensor map",
    ("aotc/serve/errors.py", "BAD, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, TOO_LONG, COMPRESSED"): "numbers of HTTP",
    ("aotc/serve/errors.py", "CONFLICT, SLOW, BUSY, HEAD_TOO_LONG, FAILED, CLOSED, LATE"): "numbers of HTTP",
    ("aotc/serve/grpc_wire.py", "_RAW_INPUTS, _RAW_OUTPUTS, _INFER_RESPONSE"): "numbers of a protocol",
    ("aotc/serve/grpc_wire.py", "_VARINT, _FIXED64, _BYTES, _FIXED32"): "numbers of a protocol",
    ("aotc/serve/grpc_service.py", "_SERVING, _NOT_SERVING"): "numbers of a protocol",
    ("aotc/serve/errors.py", "CANCELLED"): "a number of HTTP",
    ("aotc/serve/errors.py", "GOOD"): "a number of HTTP",
    ("cli/commands/check.py", "_SIZES"): "sizes to try, simple ones first",
    ("aotc/tools/explain_affinity.py", "LANE, LINE, MARGIN, HEAD"): "sizes of a drawing",
    ("aotc/tools/drawing.py", "WIDTH, ROW, MARGIN, HEAD, FOOT"): "sizes of a drawing",
    ("aotc/tools/drawing.py", "LETTER"): "sizes of a drawing",
    ("aotc/tools/drawing.py", "TICKS"): "marks of an axis",
    ("aotc/tools/drawing.py", "_ROUND"): "round numbers",
    ("aotc/tools/explain_memory.py", "HEIGHT"): "sizes of a drawing",
    ("aotc/tools/explain_affinity.py", "NAMES"): "what a box of a drawing has room for",
    ("cli/shared/interrupt.py", "_AGAIN_SECONDS"): "any short time",
    ("aotc/tools/native_code.py", "_PROGBITS, _RELA, _DYNSYM"): "the format of ELF",
    ("aotc/tools/native_code.py", "_EXECUTABLE"): "the format of ELF",
    ("aotc/tools/native_code.py", "_RELATIVE"): "the format of ELF",
    ("aotc/tools/native_code.py", "_ABSOLUTE"): "the format of ELF",
    ("cli/shared/tables.py", "_GAP"): "what rich draws",
}
COEFFICIENTS = "aotc/kernels/formulas/"  # tuples of them, and erf's constant term, are no thresholds


def is_number(node):
    """Is an expression a number, or arithmetic on numbers and constants, or a tuple of such?"""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return all(is_number(x) or (isinstance(x, ast.Name) and x.id.isupper()) for x in (left, right))
        case ast.Tuple(elts=[*elements]):
            return bool(elements) and all(map(is_number, elements))
        case ast.Call(func=ast.Name(id="int" | "float" | "min" | "max"), args=[*arguments]):
            return all(map(is_number, arguments))
    return False


def constants(path):
    """The names of a file's constants that are numbers, with what stands after each."""
    body = ast.parse(path.read_text()).body
    for statement, after in zip(body, [*body[1:], None]):
        match statement:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                name = ast.unparse(target).strip("()")
                if name.replace(", ", "").isupper() and is_number(value):
                    yield name, value, after


def comment(after):
    """The text of a statement that is a text."""
    match after:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
    return ""


def test_a_threshold_stands_in_a_table():
    wrong = []
    for path in sorted(p for folder in ("aotc", "cli") for p in (ROOT / folder).rglob("*.py") if p not in TABLES):
        file = str(path.relative_to(ROOT))
        if not file.startswith(FORMATS):
            for name, value, _ in constants(path):
                coefficients = file.startswith(COEFFICIENTS) and (isinstance(value, ast.Tuple) or name == "_ERX")
                if (file, name) not in OTHER and not coefficients:
                    wrong.append(f"{file}: {name}")
    assert not wrong, "put it into the nearest limits.py, or say in OTHER what it is"


@pytest.mark.parametrize("path", TABLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_row_has_a_unit_a_reason_and_a_source(path):
    tree = ast.parse(path.read_text())
    rows = list(constants(path))
    assert [name for name, _, after in rows if not ROW.fullmatch(comment(after))] == []
    assert len(tree.body) == 2 + 2 * len(rows), "a table has a docstring, the import of annotations, and rows"


def test_the_list_of_others_is_not_longer_than_needed():
    for file, name in OTHER:
        assert name in [n for n, _, _ in constants(ROOT / file)], f"{file} has no {name}"
