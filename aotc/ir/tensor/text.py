"""The tensor IR as text: printer and parser.

    module @main {
    func public @main(%arg0: f32[b, 4], %arg1: f32[4]) attributes {arg_names = ["x", "w"]} {
      %0 = broadcast %arg1 {dims = (1,)} : f32[b, 4]  // jit(f)/add at m.py:3
      %1 = reduce %0, %2 {dims = (1,)} : f32[b] {
        region(%s0: f32[], %s1: f32[]) {
          %3 = add %s0, %s1 : f32[]
          yield %3
        }
      }
      return %1
    }
    }

Attributes are Python literals, dims (``2*b + 1``) and arrays: ``dense("f32", (2,), [1.0, 2.0])``,
``dense("f32", (2,), "0x...")`` (raw bytes) or ``dense("f32", (1000,), "sha256:...")``, whose elements the reader looks
up in a dict.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims.algebra import Dim, Expr, floordiv, maximum, minimum, mod, sym
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value
from aotc.vmfb.dtypes import from_numpy, to_numpy


def print_module(
    module: Module, constants: dict[str, np.ndarray] | None = None, *, full: bool = False, locs: bool = True
) -> str:
    """Return ``module`` as text.

    Parameters
    ----------
    module : Module
    constants : dict, optional
        The printer adds large constants to this dict, by their ``sha256:...`` keys; pass it to :func:`parse_module`.
    full : bool
        Print large constants as raw bytes instead of references.
    locs : bool
        Print the source location of each op.
    """
    printer = _ModulePrinter(constants if constants is not None else {}, full, locs)
    lines = [f"module @{module.name} {{"]
    for function in module.functions.values():
        lines += printer.function(function)
    return "\n".join([*lines, "}", ""])


# Elements of a constant up to which the text contains them. Larger constants are separate, under a digest.
INLINE_ELEMENTS = 16


class _ModulePrinter:
    def __init__(self, constants: dict[str, np.ndarray], full: bool, locs: bool) -> None:
        self.constants, self.full, self.locs = constants, full, locs
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()

    def name(self, v: Value) -> str:
        """Return the text of a value: its name, with a number if another value of the function has the same name."""
        if v not in self.names:
            name, n = v.name, 0
            while name in self.taken:
                n += 1
                name = f"{v.name}_{n}"
            self.names[v] = name
            self.taken.add(name)
        return f"%{self.names[v]}"

    def function(self, f: Function) -> Iterator[str]:
        """Yield the lines of a function."""
        self.names, self.taken = {}, set()
        kind = "public " if f.public else ""
        attrs = f" attributes {self.attributes(f.attrs)}" if f.attrs else ""
        yield f"func {kind}@{f.name}({self.params(f.body)}){attrs} {{{self.loc(f.loc)}"
        yield from self.region(f.body, "  ", "return")
        yield "}"

    def region(self, region: Region, indent: str, end: str) -> Iterator[str]:
        """Yield the lines of a region's ops, then of its results after the word ``end``."""
        for op in region.ops:
            yield indent + self.op(op)
            for inner in op.regions:
                yield f"{indent}  region({self.params(inner)}) {{"
                yield from self.region(inner, indent + "    ", "yield")
                yield f"{indent}  }}"
            if op.regions:
                yield f"{indent}}}"
        yield f"{indent}{end} {', '.join(map(self.name, region.results))}".rstrip()

    def params(self, region: Region) -> str:
        return ", ".join(f"{self.name(p)}: {p.type}" for p in region.params)

    def op(self, op: Op) -> str:
        """Return the first line of an op, without its regions."""
        left = ", ".join(map(self.name, op.results))
        operands = ", ".join(map(self.name, op.operands))
        parts = [f"{left} = {op.name}" if left else op.name]
        parts += [x for x in (operands, self.attributes(op.attrs) if op.attrs else "") if x]
        types = ", ".join(str(v.type) for v in op.results)
        text = " ".join(parts) + (f" : {types}" if types else "")
        return text + (" {" if op.regions else "") + self.loc(op.loc)

    def loc(self, loc: Loc) -> str:
        trace = loc.traced_by.replace('"', "'").replace("  // ", " // ")
        return f"  // {trace}" if self.locs and trace else ""

    def attributes(self, attrs: Mapping[str, Any]) -> str:
        return "{" + ", ".join(f"{k} = {self.data(v)}" for k, v in attrs.items()) + "}"

    def data(self, x: Any) -> str:
        """Return the text of an attribute value, which the parser reads back as an equal value."""
        match x:
            case np.ndarray():
                return self.array_text(x)
            case Expr():
                return str(x)
            case str():
                return json.dumps(x)
            case tuple():
                return "(" + ", ".join(map(self.data, x)) + ("," if len(x) == 1 else "") + ")"
            case list():
                return "[" + ", ".join(map(self.data, x)) + "]"
            case Mapping():
                return "{" + ", ".join(f"{json.dumps(k)}: {self.data(v)}" for k, v in x.items()) + "}"
            case np.generic():
                return repr(x.item())
        return repr(x)

    def array_text(self, x: np.ndarray) -> str:
        """Return the text ``dense("dtype", shape, elements)`` of an array, in one of three encodings of the elements.

        A list of numbers, for few elements; their bytes in hexadecimal digits, for few NaN or complex elements and in
        full texts; else the digest of the bytes, which is the key of the array in :attr:`constants`.
        """
        dtype = from_numpy(x.dtype)
        shape = self.data(tuple(int(d) for d in x.shape))
        if x.size <= INLINE_ELEMENTS:
            plain = x.dtype.kind in "biuf" and not (x.dtype.kind == "f" and np.isnan(x).any())
            body = str([e.item() for e in x.reshape(-1)]) if plain else f'"0x{x.tobytes().hex()}"'
        elif self.full:
            body = f'"0x{x.tobytes().hex()}"'
        else:
            key = f"sha256:{hashlib.sha256(np.ascontiguousarray(x).view(np.uint8).data).hexdigest()}"
            self.constants[key] = x
            body = json.dumps(key)
        return f'dense("{dtype}", {shape}, {body})'


_FUNCTION = re.compile(r"func (public )?@(\S+?)\((.*?)\)(?: attributes (\{.*\}))? \{$")
_HEAD = re.compile(r"(?:(%[^=]*?) = )?([a-z_0-9]+)((?: %[^ ,]+,?)*)")
_ATTRIBUTES = re.compile(r' (\{(?:[^"{}]|"(?:\\.|[^"\\])*"|\{(?:[^"{}]|"(?:\\.|[^"\\])*"|\{[^{}]*\})*\})+\})')
_TAIL = re.compile(r"(?: : (.*?))?( \{)?")
_PARAM = re.compile(r"%(\S+): (\w+\[[^\]]*\])")
_TYPE = re.compile(r"(\w+)\[([^\]]*)\]")


def parse_module(text: str, constants: Mapping[str, np.ndarray] | None = None, path: str = "<text>") -> Module:
    """Parse a text that :func:`print_module` printed, and return the module.

    Raises
    ------
    CompileError
        If a line is invalid; the error shows the line.
    """
    reader = _ModuleReader(constants or {}, path)
    functions: dict[str, Function] = {}
    name = "main"
    for number, line in enumerate(text.splitlines(), 1):
        reader.line = number
        body = line.strip()
        if not body:
            continue
        if not reader.stack and body.startswith("module @"):
            name = body[len("module @") :].split(" ")[0]
        elif not reader.stack and body == "}":
            break
        else:
            try:
                done = reader.read(body)
            except (ValueError, KeyError, SyntaxError, TypeError) as error:
                message = f"this line cannot be read: {error}"
                raise CompileError.at(Loc(path, number, 1), message, snippet=line) from None
            if done:
                functions[done.name] = done
    return Module(functions, name)


def parse_dim(text: str) -> Dim:
    """Parse the text of a dim, as ``str`` prints it, and return it with unbounded symbols.

    Raises
    ------
    ValueError
        If ``text`` is not a dim expression.
    """
    value = _ModuleReader({}, "")._parse_python_value(text)
    if not isinstance(value, (int, Expr)):
        raise ValueError(f"{text!r} is not a dim")
    return value


class _Open:
    """A region that is being parsed, and the op it belongs to."""

    def __init__(self, params: tuple[Value, ...], header: Any) -> None:
        self.params, self.header = params, header
        self.ops: list[Op] = []
        self.results: tuple[Value, ...] = ()
        self.pending: list[Any] = []


class _ModuleReader:
    def __init__(self, constants: Mapping[str, np.ndarray], path: str) -> None:
        self.constants, self.path, self.line = constants, path, 0
        self.stack: list[_Open] = []
        self.values: dict[str, Value] = {}

    def read(self, body: str) -> Function | None:
        """Read one line; return a function if the line ends one."""
        text, loc = self._split_loc(body)
        if text.startswith("func "):
            self._open_function(text, loc)
        elif text.startswith("region("):
            params = self._parse_params(text[len("region(") : text.rindex(")")])
            self.stack.append(_Open(params, None))
        elif text == "}":
            return self._close_block()
        elif text.split(" ")[0] in ("return", "yield"):
            names = text.partition(" ")[2]
            self.stack[-1].results = self._parse_names(names)
        else:
            self._parse_op(text, loc)
        return None

    def _split_loc(self, body: str) -> tuple[str, Loc]:
        """Split a line into its text and the location in the comment at its end."""
        text, mark, trace = body.rpartition("  // ")
        if not mark or '"' in trace:
            return body, Loc(self.path, self.line, 1)
        name, at, lines = trace.rpartition(" at ")
        source, _, library = lines.partition(", in ") if at else ("", "", "")
        return text, Loc(self.path, self.line, 1, name if at else trace, source, library)

    def _open_function(self, text: str, loc: Loc) -> None:
        """Parse the first line of a function, and open its body."""
        match = _FUNCTION.match(text)
        if not match:
            raise ValueError("expected func [public] @name(params) [attributes {...}] {")
        public, name, params, attrs = match.groups()
        self.values = {}
        header = (name, bool(public), self._parse_attrs(attrs) if attrs else {}, loc)
        self.stack = [_Open(self._parse_params(params), header)]

    def _close_block(self) -> Function | None:
        """Close the op, region or function that a line ``}`` ends; return the function if the line ends one.

        An op with regions is pending until the ``}`` that follows its last region.
        """
        top = self.stack[-1]
        if top.pending:
            name, operands, results, attrs, regions, loc = top.pending.pop()
            top.ops.append(Op(name, operands, results, attrs, tuple(regions), loc))
            return None
        self.stack.pop()
        region = Region(top.params, tuple(top.ops), top.results)
        if self.stack:
            self.stack[-1].pending[-1][4].append(region)
            return None
        name, public, attrs, loc = top.header
        return Function(name, region, public, attrs, loc)

    def _parse_op(self, text: str, loc: Loc) -> None:
        """Parse an op. An op that opens a region is pending until its regions are closed."""
        head = _HEAD.match(text)
        attributes = _ATTRIBUTES.match(text, head.end()) if head else None
        tail = _TAIL.fullmatch(text, (attributes or head).end()) if head else None
        if not head or not tail:
            raise ValueError("expected %results = op %operands {attributes} : types")
        (left, name, operands), attrs, (types, opens) = head.groups(), attributes and attributes[1], tail.groups()
        values = self._parse_names(operands)
        kinds = [self._parse_type(*m) for m in _TYPE.findall(types or "")]
        labels = [x.strip().lstrip("%") for x in left.split(",")] if left else []
        if len(labels) != len(kinds):
            raise ValueError(f"{len(labels)} results but {len(kinds)} types")
        data = self._parse_attrs(attrs) if attrs else {}
        results = tuple(Value(n, t) for n, t in zip(labels, kinds))
        if opens:
            self.stack[-1].pending.append([name, values, results, data, [], loc])
        else:
            self.stack[-1].ops.append(Op(name, values, results, data, (), loc))
        self.values.update(zip(labels, results))

    def _parse_names(self, text: str) -> tuple[Value, ...]:
        return tuple(self.values[x.strip().lstrip("%")] for x in text.split(",") if x.strip())

    def _parse_params(self, text: str) -> tuple[Value, ...]:
        params = tuple(Value(name, self._parse_type(*_TYPE.findall(t)[0])) for name, t in _PARAM.findall(text))
        self.values.update((p.name, p) for p in params)
        return params

    def _parse_type(self, dtype: str, dims: str) -> TensorType:
        return TensorType(dtype, self._parse_python_value(f"({dims},)") if dims else ())

    def _parse_attrs(self, text: str) -> dict[str, Any]:
        """Return the attributes in a text of the form ``{name = value, ...}``."""
        call = ast.parse(f"f({text[1:-1]})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(f"expected {{name = value, ...}}, found {text}")
        return {k.arg or "": self._value_of_node(k.value) for k in call.keywords}

    def _parse_python_value(self, text: str) -> Any:
        return self._value_of_node(ast.parse(text, mode="eval").body)

    def _value_of_node(self, node: ast.AST) -> Any:
        """Evaluate the syntax tree of an attribute or a dim: Python literals, dims over symbols, and ``dense(...)``.

        Raises
        ------
        ValueError
            If the text has any other syntax.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return {"inf": math.inf, "nan": math.nan}.get(name) or sym(name)
            case ast.Tuple(elts=items):
                return tuple(map(self._value_of_node, items))
            case ast.List(elts=items):
                return list(map(self._value_of_node, items))
            case ast.Dict(keys=keys, values=values):
                return {self._value_of_node(k): self._value_of_node(v) for k, v in zip(keys, values) if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return -self._value_of_node(x)
            case ast.BinOp(left=left, op=op, right=right):
                if type(op) in _ARITHMETIC:
                    return _ARITHMETIC[type(op)](self._value_of_node(left), self._value_of_node(right))
            case ast.Call(func=ast.Name(id="dense"), args=arguments):
                return self._parse_array(*map(self._value_of_node, arguments))
            case ast.Call(func=ast.Name(id=name), args=[a, b]) if name in ("max", "min"):
                return (maximum if name == "max" else minimum)(self._value_of_node(a), self._value_of_node(b))
        raise ValueError(f"unexpected {ast.unparse(node)}")

    def _parse_array(self, dtype: str, shape: tuple[int, ...], body: Sequence[Any] | str) -> np.ndarray:
        """Return a constant from its elements, from the digits of its bytes, or by its digest."""
        kind = to_numpy(dtype)
        if isinstance(body, str) and body.startswith("sha256:"):
            return self.constants[body]
        if isinstance(body, str):
            return np.frombuffer(bytes.fromhex(body[2:]), kind).reshape(shape)
        return np.array(body, np.float64 if kind.kind == "f" else None).astype(kind).reshape(shape)


_ARITHMETIC: dict[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}
