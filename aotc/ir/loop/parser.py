"""Parse the text of a kernel that ``printer`` wrote, with Python's own parser."""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from aotc.ir.dims import algebra as dims
from aotc.ir.dims.algebra import Dim, Sym
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.forms.records import read_record
from aotc.ir.loop.forms.tile_forms import F32, TileForm
from aotc.ir.loop.forms.tiling import TILING_CLASSES, Tiling
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Const,
    Either,
    ExternalCall,
    For,
    GridBarrier,
    If,
    Index,
    Kernel,
    Let,
    Load,
    Prefetch,
    Scalar,
    Shuffle,
    Stmt,
    Store,
    Tile,
    Var,
    WarpMatch,
    While,
)
from aotc.ir.loop.types import LOOPS, OPERATORS, loop_symbol, natural_dtype
from aotc.ir.opset import ACCUMULATED, ATOMIC
from aotc.support.memoize import memoized
from aotc.vmfb.dtypes import DTYPES, kind_of

_ATOMICS = frozenset(f"atomic_{name}" for name in ATOMIC)
_REDUCTIONS = frozenset(f"reduce_{name}" for name in ACCUMULATED)
_SPACES = ("private", "scratch", "shared")
_OPERATIONS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip


RECORDS: dict[str, type] = {**TILING_CLASSES, "TileForm": TileForm, "Transform": Transform}
"""The classes of the facts that a kernel's text contains, by name."""
T = TypeVar("T")


def parse_kernel(text: str) -> Kernel:
    """Return the kernel of ``text``, one Python function.

    Raises
    ------
    ValueError
        If the text is not Python, or not a kernel; the message has the location.
    """
    try:
        tree = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from error
    if len(tree) != 1 or not isinstance(tree[0], ast.FunctionDef):
        raise ValueError("line 1: expected one function")
    return _Parser().parse_function(tree[0])


def _fail_at_node(node: ast.AST, message: str) -> NoReturn:
    raise ValueError(f"line {getattr(node, 'lineno', 1)}: {message}: {ast.unparse(node)}")


class _Parser:
    """Parser of one kernel; it records the buffers and variables that are defined so far."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.symbols: dict[str, Dim] = {}
        self.scalars: dict[str, Var] = {}

    def parse_function(self, function: ast.FunctionDef) -> Kernel:
        """Return the kernel of a function definition."""
        about: dict[str, ast.expr] = {}
        names: list[str] = []
        for argument in function.args.kwonlyargs:
            value = _parameter_annotation(argument)
            if isinstance(value, ast.Name) and value.id == "dim":
                self.symbols[argument.arg] = dims.sym(argument.arg)
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dim":
                self.symbols[argument.arg] = self.parse_symbol_bounds(Sym(argument.arg), value)
            else:
                about[argument.arg] = value
                continue
            names.append(argument.arg)
        inputs = tuple(map(self.parse_parameter, function.args.posonlyargs))
        outputs = tuple(map(self.parse_parameter, function.args.args))
        if "grid" not in about:
            raise ValueError(f"line {function.lineno}: kernel {function.name} has no grid")
        aliases = ast.literal_eval(about["aliases"]) if "aliases" in about else ()
        work = [self.parse_dim(about[key]) if key in about else 0 for key in ("flops", "bytes")]
        grid = self.parse_dim(about["grid"])
        body = self.parse_block(function.body)
        tiling = _parse_record(about["tiling"], Tiling) if "tiling" in about else None
        pairs = tuple(map(tuple, aliases))
        return Kernel(function.name, inputs, outputs, tuple(names), grid, body, pairs, work[0], work[1], tiling)

    def parse_parameter(self, argument: ast.arg) -> Buffer:
        buffer = self.parse_buffer(argument.arg, _parameter_annotation(argument), "global")
        self.buffers[argument.arg] = buffer
        return buffer

    def parse_buffer(self, name: str, node: ast.expr, space: Any) -> Buffer:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in DTYPES:
            return Buffer(name, node.value.id, self.parse_dims(node.slice), space)
        _fail_at_node(node, "expected a type such as f32[3, 8]")

    def parse_symbol_bounds(self, implied: Sym, call: ast.Call) -> Dim:
        """Return the symbol that a definition implies, with the bounds that ``call`` states (``lo``, ``extent``)."""
        keywords = {k.arg: self.parse_dim(k.value) for k in call.keywords if k.arg in ("lo", "extent")}
        low = keywords.get("lo", implied.lo)
        if not isinstance(low, int):
            _fail_at_node(call, "lo is not a number")
        return dims.sym(implied.name, low, keywords.get("extent", implied.extent))

    # --- index expressions: built as written, so that the text stays the same ---

    def parse_dims(self, node: ast.expr) -> tuple[Dim, ...]:
        return tuple(map(self.parse_dim, node.elts)) if isinstance(node, ast.Tuple) else (self.parse_dim(node),)

    def parse_dim(self, node: ast.expr) -> Dim:
        """Return the index expression of a syntax tree."""
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return (
                    self.symbols[name]
                    if name in self.symbols
                    else _fail_at_node(node, f"{name} is not an integer in scope")
                )
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.parse_dim(operand)
            case ast.BinOp(left=left, op=op, right=right):
                operation = _OPERATIONS.get(type(op)) or _fail_at_node(node, "not an index operation")
                return _dim_operation(operation, self.parse_dim(left), self.parse_dim(right))
            case ast.Call(func=ast.Name(id="max" | "min" as fn), args=[a, b]):
                return _dim_operation(fn, self.parse_dim(a), self.parse_dim(b))
        _fail_at_node(node, "not an index expression")

    # --- statements ---

    def parse_block(self, body: Sequence[ast.stmt]) -> tuple[Stmt, ...]:
        """Return the statements of a block; names that it defines end with it."""
        saved = dict(self.buffers), dict(self.symbols), dict(self.scalars)
        stmts = tuple(self.parse_statement(node) for node in body if not isinstance(node, ast.Pass))
        self.buffers, self.symbols, self.scalars = saved
        return stmts

    def parse_statement(self, node: ast.stmt) -> Stmt:
        """Return the statement of a syntax tree; raise ValueError for Python that is not loop IR."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return self.parse_definition(name, value)
            case ast.Assign(targets=[ast.Subscript() as place], value=value):
                return self.parse_store(place, value)
            case ast.AugAssign(target=ast.Subscript() as place, op=ast.Add() | ast.Mult() as op, value=value):
                reduce = "add" if isinstance(op, ast.Add) else "mul"
                return Store(*self.parse_place(place), self.parse_scalar(value), reduce)
            case ast.For(target=ast.Name(id=var), iter=ast.Call() as call, body=body, orelse=[]):
                return self.parse_loop(var, call, body)
            case ast.If(test=test, body=then, orelse=otherwise):
                return If(self.parse_scalar(test), self.parse_block(then), self.parse_block(otherwise))
            case ast.While(test=ast.Constant(value=True), body=body):
                return self.parse_while(node, body)
            case ast.Expr(value=ast.Call(func=ast.Name(id="prefetch"), args=[ast.Subscript() as place])):
                return Prefetch(*self.parse_place(place))
            case ast.Expr(value=ast.Call(func=ast.Name(id="barrier" | "warp_barrier" as name), args=[])):
                return Barrier(warp=name == "warp_barrier")
            case ast.Expr(value=ast.Call(func=ast.Name(id="grid_barrier"), args=[counter])):
                return GridBarrier(self.find_buffer(counter))
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="shuffle" | "match" as name),
                    args=[to, source],
                    keywords=[ast.keyword(arg="mask" | "bits", value=ast.Constant(value=int(number)))],
                )
            ):
                exchange = Shuffle if name == "shuffle" else WarpMatch
                return exchange(self.find_buffer(to), self.find_buffer(source), number)
            case ast.Expr(value=ast.Call(func=ast.Name(id="tile")) as call):
                return self.parse_tile(call)
            case ast.Expr(value=ast.Call(func=ast.Name(id="call"), args=[ast.Constant(value=str(name)), *places])):
                return ExternalCall(name, tuple(self.parse_address(p) for p in places))
            case ast.Expr(value=ast.Call(func=ast.Name(id="call"), args=[ast.Call() as record, *places])):
                return ExternalCall(_parse_record(record, Transform), tuple(self.parse_address(p) for p in places))
        _fail_at_node(node, "not a statement of the loop IR")

    def parse_definition(self, name: str, value: ast.expr) -> Stmt:
        """Return the statement ``name = value``: an allocation, a selection of buffers, or a scalar definition."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            if value.func.id in _SPACES:
                buffer = self.parse_buffer(name, _quoted_text(value.args[0]), value.func.id)
                self.buffers[name] = buffer
                return Alloc(buffer)
            if value.func.id == "either":
                cond, one, other, kind = value.args
                places = self.parse_address(one), self.parse_address(other)
                buffer = self.parse_buffer(name, _quoted_text(kind), "scratch")
                self.buffers[name] = buffer
                return Either(buffer, self.parse_scalar(cond), places)
            if value.func.id == "let":
                bound = self.parse_scalar(value.args[0])
                dtypes = [k.value for k in value.keywords if k.arg == "dtype"]
                var = Var(name, ast.literal_eval(dtypes[0]) if dtypes else bound.dtype)
                return self.bind_variable(var, bound, self.parse_symbol_bounds(Sym(name), value))
        bound = self.parse_scalar(value)
        return self.bind_variable(Var(name, bound.dtype), bound, dims.sym(name))

    def bind_variable(self, var: Var, value: Scalar, symbol: Dim) -> Let:
        """Define a scalar, and for an integer its symbol; return the definition."""
        self.scalars[var.name] = var
        if kind_of(var.dtype) in "iu":
            self.symbols[var.name] = symbol
        return Let(var, value)

    def parse_place(self, node: ast.Subscript) -> tuple[Buffer, tuple[Dim, ...]]:
        return self.find_buffer(node.value), self.parse_dims(node.slice)

    def parse_address(self, node: ast.expr) -> tuple[Buffer, tuple[Dim, ...]]:
        """Return the buffer and index of an argument of a call."""
        return (
            self.parse_place(node)
            if isinstance(node, ast.Subscript)
            else _fail_at_node(node, "not an element of a buffer")
        )

    def find_buffer(self, node: ast.expr) -> Buffer:
        if not isinstance(node, ast.Name) or node.id not in self.buffers:
            _fail_at_node(node, "not a buffer in scope")
        return self.buffers[node.id]

    def parse_store(self, place: ast.Subscript, value: ast.expr) -> Store:
        """Return a store: plain, with a reduction, or atomic."""
        match value:
            case ast.Call(func=ast.Name(id=name), args=[_, operand]) if name in _ATOMICS:
                return Store(
                    *self.parse_place(place), self.parse_scalar(operand), name.removeprefix("atomic_"), atomic=True
                )
            case ast.Call(func=ast.Name(id=name), args=[_, operand]) if name in _REDUCTIONS:
                return Store(*self.parse_place(place), self.parse_scalar(operand), name.removeprefix("reduce_"))
        return Store(*self.parse_place(place), self.parse_scalar(value))

    def parse_loop(self, var: str, call: ast.Call, body: list[ast.stmt]) -> For:
        """Return the loop over ``var``, whose kind is the name of the called range function."""
        if not isinstance(call.func, ast.Name) or call.func.id not in LOOPS or not 2 <= len(call.args) <= 3:
            _fail_at_node(call, "not a range of the loop IR")
        begin, end = map(self.parse_dim, call.args[:2])
        step = self.parse_dim(call.args[2]) if len(call.args) == 3 else 1
        if not isinstance(step, int):
            _fail_at_node(call, "the step is not a number")
        hidden = self.symbols.get(var)
        self.symbols[var] = self.parse_symbol_bounds(loop_symbol(var, begin, end), call)
        inner = self.parse_block(body)
        if hidden is None:
            del self.symbols[var]
        else:
            self.symbols[var] = hidden
        return For(var, begin, end, inner, LOOPS[call.func.id], step)

    def parse_while(self, node: ast.stmt, body: list[ast.stmt]) -> While:
        """Return a loop; the statements before ``if not ...: break`` compute its condition."""
        for k, stmt in enumerate(body):
            match stmt:
                case ast.If(test=ast.UnaryOp(op=ast.Not(), operand=pred), body=[ast.Break()], orelse=[]):
                    saved = dict(self.buffers), dict(self.symbols), dict(self.scalars)
                    cond = tuple(self.parse_statement(s) for s in body[:k] if not isinstance(s, ast.Pass))
                    result = While(cond, self.parse_scalar(pred), self.parse_block(body[k + 1 :]))
                    self.buffers, self.symbols, self.scalars = saved
                    return result
        _fail_at_node(node, "while True without `if not ...: break`")

    def parse_tile(self, call: ast.Call) -> Tile:
        """Return a tile operation; absent offsets are 0, an absent form is plain f32."""
        out, a, b = map(self.find_buffer, call.args)
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        levels = keywords["levels"]
        if not isinstance(levels, ast.List):
            _fail_at_node(call, "levels is not a list")
        nest: list[Any] = [self.parse_dims(level) for level in levels.elts]
        rows, cols = (ast.literal_eval(keywords[k]) for k in ("rows", "cols"))
        form = _parse_record(keywords["form"], TileForm) if "form" in keywords else F32
        optional = [k for k in ("a_inner", "b_column", "b_inner") if k in keywords]
        at = {k: self.parse_dim(keywords[k]) for k in ("out_base", "out_row", "a_base", "a_row", "b_base", *optional)}
        return Tile(rows, cols, out=out, a=a, b=b, levels=tuple(nest), form=form, adds="adds" in keywords, **at)

    # --- scalars ---

    def parse_scalar(self, node: ast.expr) -> Scalar:
        """Return the scalar expression of a syntax tree."""
        match node:
            case ast.Name(id=name) if name in self.scalars:
                return self.scalars[name]
            case ast.Subscript():
                return Load(*self.parse_place(node))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return self.parse_apply(node, OPERATORS[type(op)], [left, right])
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
                return self.parse_apply(node, OPERATORS[type(op)], [left, right])
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
                return self.parse_apply(node, OPERATORS[type(op)], [operand])
            case ast.Call(func=ast.Name(id="index"), args=[expr, *dtype]):
                return Index(self.parse_dim(expr), *map(ast.literal_eval, dtype))
            case ast.Call(func=ast.Name(id=name), args=args) if name in DTYPES:
                return Const(_constant_scalar(args), name)
            case ast.Call(func=ast.Name(id=name), args=args):
                return self.parse_apply(node, name.removesuffix("_"), args)
        _fail_at_node(node, "not a scalar")

    def parse_apply(self, node: ast.expr, fn: str, args: list[ast.expr]) -> Apply:
        """Return a scalar operation; its dtype is the last argument or follows from the operands."""
        explicit = None
        if args and isinstance(args[-1], ast.Constant) and isinstance(args[-1].value, str):
            explicit, args = args[-1].value, args[:-1]
        values = tuple(map(self.parse_scalar, args))
        dtype = explicit or natural_dtype(fn, tuple(v.dtype for v in values))
        if dtype is None:
            _fail_at_node(node, f"{fn} does not say its dtype")
        return Apply(fn, values, dtype)


@memoized
def _dim_operation(fn: str, a: Dim, b: Dim) -> Dim:
    """Return the dim expression ``a fn b``, memoized."""
    match fn:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
    if isinstance(a, int) and isinstance(b, int):
        return {"//": dims.floordiv, "%": dims.mod, "max": dims.maximum, "min": dims.minimum}[fn](a, b)
    return dims.Expr(0, (((dims.Call(fn, a, b),), 1),))


def _parse_record(node: ast.expr, kind: type[T]) -> T:
    """Return the record of class ``kind`` that the syntax tree ``node`` creates."""
    try:
        record = read_record(node, RECORDS)
    except (TypeError, ValueError) as error:
        _fail_at_node(node, f"expected a {kind.__name__}, found {error}")
    return record if isinstance(record, kind) else _fail_at_node(node, f"expected a {kind.__name__}")


def _quoted_text(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _quoted_expression(node.value)
    _fail_at_node(node, "expected a text in quotes")


@lru_cache(maxsize=1024)
def _quoted_expression(text: str) -> ast.expr:
    """Return the syntax tree of a quoted expression; memoized, as a kernel repeats most types."""
    return ast.parse(text.replace("[]", "[()]"), mode="eval").body


def _parameter_annotation(argument: ast.arg) -> ast.expr:
    if argument.annotation is None:
        _fail_at_node(argument, "no type")
    return _quoted_text(argument.annotation)


def _constant_scalar(args: list[ast.expr]) -> bool | int | float | complex:
    if len(args) == 2:
        return complex(_number_of_node(args[0]), _number_of_node(args[1]))
    return _number_of_node(args[0])


def _number_of_node(node: ast.expr) -> Any:
    """Return the number of a literal, including ``inf``, ``nan`` and NaNs by their bits."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id="nan"):
            return math.nan
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number_of_node(operand)
        case ast.Call(func=ast.Name(id="nan_bits"), args=[ast.Constant(value=int(bits))]):
            return struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    _fail_at_node(node, "not a literal")
