"""Run a kernel by executing its printed Python on NumPy arrays: the reference semantics of the loop IR.

Slow, with a defined order: loops run one iteration after the other, and every scalar op is the NumPy reference of the
op table.
"""

from __future__ import annotations

import ast
import keyword
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from types import CodeType
from typing import Any

import numpy as np

from aotc.ir.loop.forms.fft import Transform, run_transform
from aotc.ir.loop.forms.quantized import unpack
from aotc.ir.loop.forms.tile_forms import F32, TileForm
from aotc.ir.loop.ir import WARP, Kernel, Let, walk
from aotc.ir.loop.parser import RECORDS, parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.types import LOOPS, OPERATORS
from aotc.ir.opset import ACCUMULATED, ATOMIC, INFIX, SCALARS, ScalarOp, elementwise
from aotc.ir.opset.elementwise_quick import quick_convert, quick_precision, quick_scalar
from aotc.ir.opset.linalg_lapack_reference import call_scipy_lapack
from aotc.vmfb.dtypes import DTYPES, from_numpy, to_numpy

_PREFIX = "call_"
_NOT_FINITE = {"inf": np.inf, "nan": np.nan}


def run_kernel(
    kernel: Kernel | str,
    arrays: Sequence[np.ndarray],
    dims: Mapping[str, int] | None = None,
    begin: int = 0,
    end: int | None = None,
    executed: Counter[str] | None = None,
) -> None:
    """Execute ``kernel`` on ``arrays`` (inputs, then outputs), writing the outputs in place.

    Parameters
    ----------
    kernel : Kernel or str
        The kernel or its text.
    arrays : sequence of np.ndarray
        One per input and output, with exactly their dtypes; outputs are written.
    dims : mapping
        Values of the kernel's dims.
    begin, end : int
        The range of iterations of the ``parallel`` loop; all of them by default.
    executed : Counter, optional
        Counts executed scalar operations, by name.

    Raises
    ------
    IndexError
        If an index is out of bounds (negative ones included).
    ValueError
        If the number of arrays or a dtype is wrong.
    """
    kernel, code, literals = _compiled_kernel_text(kernel if isinstance(kernel, str) else print_kernel(kernel))
    values = dict(dims or {})
    parameters = (*kernel.inputs, *kernel.outputs)
    if len(arrays) != len(parameters):
        raise ValueError(f"kernel {kernel.name} takes {len(parameters)} arrays, found {len(arrays)}")
    names: dict[str, Any] = {name: int(values[name]) for name in kernel.dims}
    for buffer, array in zip(parameters, arrays):
        if array.dtype != to_numpy(buffer.dtype):
            raise ValueError(f"{buffer.name} is {buffer.dtype}, found an array of {array.dtype}")
        names[buffer.name] = _Memory(array)
    functions = {_PREFIX + name: function for name, function in _interpreter_functions(begin, end, executed).items()}
    with np.errstate(all="ignore"):
        exec(code, {**RECORDS, **functions, **literals, **_NOT_FINITE, **names})


@lru_cache(maxsize=64)
def _compiled_kernel_text(text: str) -> tuple[Kernel, CodeType, Mapping[str, Any]]:
    """Return a kernel, its compiled code, and its named literals."""
    kernel = parse_kernel(text)
    rewrite = _KernelTextRewriter({s.var.name for s in walk(kernel.body) if isinstance(s, Let)})
    program = ast.Module([rewrite.visit(s) for s in getattr(ast.parse(text).body[0], "body", [])], [])
    code = compile(ast.fix_missing_locations(program), f"<kernel {kernel.name}>", "exec")
    return kernel, code, rewrite.literals


class _Memory:
    """An array that rejects negative indices, which NumPy would wrap around."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def _outside(self, index: Any) -> IndexError:
        return IndexError(f"index {index} is out of bounds for shape {self.array.shape}")

    def __getitem__(self, index: Any) -> Any:
        if (min(index, default=0) if index.__class__ is tuple else index) < 0:
            raise self._outside(index)
        return self.array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if (min(index, default=0) if index.__class__ is tuple else index) < 0:
            raise self._outside(index)
        self.array[index] = value


class _KernelTextRewriter(ast.NodeTransformer):
    """Rewrites the syntax tree of a kernel for execution.

    Functions get other names than variables, and scalars in indices become Python integers.
    """

    def __init__(self, lets: set[str]) -> None:
        self.lets, self.literals = lets, dict[str, Any]()

    def _literal(self, node: ast.Call, dtype: str) -> ast.AST:
        """Return the name of a literal; equal literals share one."""
        parts = [eval(compile(ast.Expression(a), "<literal>", "eval"), dict(_NOT_FINITE)) for a in node.args]
        name = f"{_PREFIX}{dtype}_{len(self.literals)}"
        self.literals[name] = _literal_function(dtype)(*parts)
        return ast.Name(name, ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrite a call to a function of the interpreter: dims, types and buffer elements become plain arguments."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in DTYPES:
            return self._literal(node, name)
        if name in ("index", *LOOPS):
            arguments = [_DimRewriter(self.lets).visit(a) for a in node.args]
            node.args = arguments
        elif name == "call":
            integers = _DimRewriter(self.lets)
            node.args[1:] = [ast.Tuple([a.value, integers.visit(a.slice)], ast.Load()) for a in node.args[1:]]  # type: ignore[attr-defined]
        elif name == "either":
            integers = _DimRewriter(self.lets)
            places = [ast.Tuple([a.value, integers.visit(a.slice)], ast.Load()) for a in node.args[1:3]]  # type: ignore[attr-defined]
            node.args = [self.visit(node.args[0]), *places, self._type(node.args[3])[1]]
        elif name in ("private", "scratch", "shared"):
            node.args = self._type(node.args[0])
        elif name == "tile":
            for keyword in node.keywords:
                keyword.value = _DimRewriter(self.lets).visit(keyword.value)
        else:
            node.args = [self.visit(a) for a in node.args]
        if name in ("index", "let"):
            node.keywords = [k for k in node.keywords if k.arg == "dtype"]
        if name in LOOPS:
            node.keywords = []
        node.func = ast.Name(_PREFIX + name, ast.Load())
        return node

    def _type(self, text: ast.expr) -> list[ast.expr]:
        """Return the dtype and the sizes of a quoted type as syntax trees."""
        kind: Any = ast.parse(str(ast.literal_eval(text)).replace("[]", "[()]"), mode="eval").body
        dims = kind.slice if isinstance(kind.slice, ast.Tuple) else ast.Tuple([kind.slice], ast.Load())
        return [ast.Constant(kind.value.id), _DimRewriter(self.lets).visit(dims)]

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.slice = _DimRewriter(self.lets).visit(node.slice)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        return self._infix(OPERATORS[type(node.op)], [node.left, node.right])

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return self._infix(OPERATORS[type(node.ops[0])], [node.left, *node.comparators])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Rewrite an operator to a call; signs of literals and ``not`` of a loop's test stay."""
        if isinstance(node.op, ast.USub) and isinstance(node.operand, (ast.Constant, ast.Name)):
            name = node.operand.id if isinstance(node.operand, ast.Name) else ""
            if name not in self.lets:
                return node
        if isinstance(node.op, ast.Not):
            node.operand = self.visit(node.operand)
            return node
        return self._infix(OPERATORS[type(node.op)], [node.operand])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        target = self.visit(node.target)
        load = ast.Subscript(target.value, target.slice, ast.Load())
        value = self._call(OPERATORS[type(node.op)], [load, self.visit(node.value)])
        return ast.copy_location(ast.Assign([target], value), node)

    def _infix(self, name: str, operands: list[ast.expr]) -> ast.Call:
        return self._call(name, [self.visit(a) for a in operands])

    @staticmethod
    def _call(name: str, operands: list[ast.expr]) -> ast.Call:
        return ast.Call(ast.Name(_PREFIX + name, ast.Load()), operands, [])


class _DimRewriter(ast.NodeTransformer):
    """Rewrites index expressions: NumPy scalars become Python integers, which do not overflow."""

    def __init__(self, lets: set[str]) -> None:
        self.lets = lets

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _KernelTextRewriter._call("int", [node]) if node.id in self.lets else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(a) for a in node.args]
        return node


def _interpreter_functions(begin: int, end: int | None, executed: Counter[str] | None) -> dict[str, Callable]:
    """Return the Python functions that execute the calls in a kernel's text, by name.

    Of the parallel loop, iterations from ``begin`` up to ``end`` run. ``executed`` counts scalar operations by name.
    """
    functions: dict[str, Callable] = {name: _scalar_function(row) for name, row in SCALARS.items()}
    if executed is not None:
        functions = {name: _counted_function(name, function, executed) for name, function in functions.items()}
    functions |= {f"{name}_": functions[name] for name in SCALARS if keyword.iskeyword(name)}
    functions |= dict.fromkeys(LOOPS, range)
    functions |= dict.fromkeys(("private", "scratch", "shared"), _allocate)
    functions |= {f"reduce_{name}": functions[name] for name in ACCUMULATED - INFIX.keys()}
    functions |= {f"atomic_{name}": functions[name] for name in ATOMIC}
    return functions | {
        "parallel": lambda first, last, step=1: range(first, last, step)[begin:end],
        "bitcast": lambda x, dtype: np.asarray(x).reshape(1).view(to_numpy(dtype))[0],
        "reduce_precision": _with_fewer_bits,
        "index": _index_value,
        "int": int,
        "let": lambda value, dtype=None: value,
        "nan_bits": lambda bits: np.uint64(bits).view(np.float64),
        "prefetch": lambda element: None,
        "barrier": lambda: None,
        "warp_barrier": lambda: None,
        "grid_barrier": lambda counter: None,
        "shuffle": _run_shuffle,
        "match": _run_match,
        "call": _call_library_function,
        "either": _selected_array,
        "tile": _tile,
    }


def _scalar_function(row: ScalarOp) -> Callable:
    """Return the op of the table as a function of scalars; it picks an implementation once per set of operand types."""
    functions: dict[Any, Callable] = {}

    def exact(*arguments: Any) -> Any:
        arrays = list(map(np.asarray, arguments))
        dtype = elementwise.result_dtype(row, tuple(from_numpy(a.dtype) for a in arrays), None)
        return np.asarray(elementwise.apply_scalar_op(row, arrays, dtype)).reshape(())[()]

    def call(*arguments: Any) -> Any:
        kinds = (*map(type, arguments),)
        function = functions.get(kinds)
        if function is None:
            function = functions[kinds] = quick_scalar(row, kinds, exact)
        return function(*arguments)

    def call_with_dtype(x: Any, dtype: str) -> Any:
        function = functions.get((type(x), dtype))
        if function is None:
            slow = lambda x: np.asarray(elementwise.apply_scalar_op(row, [np.asarray(x)], dtype)).reshape(())[()]
            function = functions[type(x), dtype] = quick_convert(type(x), dtype, slow)
        return function(x)

    return call_with_dtype if row.result == "given" else call


def _with_fewer_bits(x: Any, exponent_bits: int, mantissa_bits: int) -> Any:
    bits = int(exponent_bits), int(mantissa_bits)
    rounded = quick_precision(x, *bits)
    return elementwise.with_fewer_bits(np.asarray(x), *bits)[()] if rounded is None else rounded


def _counted_function(name: str, function: Callable, executed: Counter[str]) -> Callable:
    """Return ``function`` with its calls counted in ``executed[name]``."""
    def call(*arguments: Any) -> Any:
        executed[name] += 1
        return function(*arguments)

    return call


def _literal_function(dtype: str) -> Callable:
    return lambda *parts: np.array(complex(*parts) if len(parts) == 2 else parts[0]).astype(to_numpy(dtype))[()]


def _index_value(value: int, dtype: str = "i64") -> Any:
    """Return an index as a NumPy integer; smaller dtypes keep its low bits."""
    if dtype == "i64":
        return np.int64(value)
    if dtype == "i32" and -(1 << 31) <= value < 1 << 31:
        return np.int32(value)
    return np.array(value, np.int64).astype(to_numpy(dtype))[()]


def _allocate(dtype: str, dims: tuple[int, ...]) -> _Memory:
    return _Memory(np.zeros(dims, to_numpy(dtype)))


def _call_library_function(function: str | Transform, *places: tuple[_Memory, Any]) -> None:
    """Call a library function; each argument is the memory from an element of a buffer on."""
    arrays = [_memory_from_element(str(function), *place) for place in places]
    if isinstance(function, Transform):
        run_transform(function, arrays)
    else:
        call_scipy_lapack(function, arrays)


def _memory_from_element(user: str, memory: _Memory, index: Any) -> np.ndarray:
    """Return the flat memory from the element ``index`` on; ``user`` names the caller in errors."""
    array = memory.array
    at = index if isinstance(index, tuple) else (index,)
    flat = array.reshape(-1)
    if array.size and not np.shares_memory(flat, array):
        raise ValueError(f"an argument of {user} is not contiguous")
    return flat[sum(i * s // array.itemsize for i, s in zip(at, array.strides, strict=True)) :]


def _selected_array(cond: Any, one: tuple[_Memory, Any], other: tuple[_Memory, Any], dims: tuple[int, ...]) -> _Memory:
    """Return an array of sizes ``dims`` in the memory from the selected element on."""
    memory = _memory_from_element("either", *(one if cond else other))
    return _Memory(memory[: math.prod(dims)].reshape(dims))


def _run_shuffle(to: _Memory, source: _Memory, mask: int) -> None:
    to.array[:] = source.array[np.arange(len(source.array)) ^ mask]


def _run_match(to: _Memory, source: _Memory, bits: int) -> None:
    warps = source.array.reshape(-1, WARP) & np.uint32((1 << bits) - 1)
    same = warps[:, :, None] == warps[:, None, :]
    to.array[:] = (same * (np.uint64(1) << np.arange(WARP, dtype=np.uint64))).sum(-1).reshape(-1).astype(np.uint32)


def _tile(
    out: _Memory, a: _Memory, b: _Memory, *, rows: int, cols: int, levels: list, form: TileForm = F32, **at: Any
) -> None:
    """Run a ``Tile`` statement as nested loops, in the precision of the output."""
    flat_out, flat_a, flat_b = (m.array.reshape(-1) for m in (out, a, b))
    if not np.shares_memory(flat_out, out.array):
        raise ValueError("the output of a tile is not contiguous")
    kind, group = out.array.dtype, form.group
    place = at["out_base"] + at["out_row"] * np.arange(rows)[:, None] + np.arange(cols)
    total = flat_out[place] if at.get("adds") else np.zeros((rows, cols), kind)
    inner = at.get("b_inner") or 1
    column_step = at.get("b_column") or (1 if "b_inner" in at else group)
    if form.scaled:
        flat_b, levels = _dequantized_panel(flat_b[at["b_base"] :], cols, levels, form)
        at = {**at, "b_base": 0}
    for k in product(*(range(extent) for extent, _, _ in levels)):
        a_at = at["a_base"] + sum(i * step for i, (_, step, _) in zip(k, levels))
        b_at = at["b_base"] + sum(i * step for i, (_, _, step) in zip(k, levels))
        for t in range(group):
            column = flat_a[a_at + t * at.get("a_inner", 1) + at["a_row"] * np.arange(rows)].astype(kind)
            row = flat_b[b_at + t * inner + column_step * np.arange(cols)].astype(kind)
            total += column[:, None] * (row + form.offset if form.offset else row)
    flat_out[place] = total


def _dequantized_panel(bytes_: np.ndarray, cols: int, levels: list, form: TileForm) -> tuple[np.ndarray, list]:
    """Return a quantized panel as an f32 array, and the levels of a tile that reads it."""
    (runs, a_run, chunk), (steps, a_step, _) = levels
    per = form.group
    rows = unpack(bytes_[: runs * chunk].reshape(1, runs, chunk), cols, form.bits)
    interleaved = rows.reshape(-1, per, cols).swapaxes(1, 2).reshape(-1)
    return interleaved, [(runs, a_run, steps * per * cols), (steps, a_step, per * cols)]
