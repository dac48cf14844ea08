"""Routing programs of a mixture of experts whose every dim is static or dynamic, written as StableHLO text.

The sizes are ``tokens``, ``experts``, ``k`` and ``features``. Static ones are numbers in
the types; dynamic ones are ``?`` and come from ``get_dimension_size``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

DIMS = ("tokens", "experts", "k", "features")
SUBSETS = tuple(frozenset(d for i, d in enumerate(DIMS) if n >> i & 1) for n in range(16))


class Text:
    """Writer of StableHLO ops; a shape is a tuple of numbers and of names of dims."""

    def __init__(self, dynamic: frozenset[str], sizes: Mapping[str, int], arguments: Sequence[tuple[str, tuple, str]]):
        self.dynamic, self.sizes = dynamic, sizes
        self.lines: list[str] = []
        self.count = 0
        self.places = {}
        for name, shape, _ in arguments:
            for axis, d in enumerate(shape):
                self.places.setdefault(d, (name, axis))
        self.types = {name: self.type(shape, dtype) for name, shape, dtype in arguments}
        self.header = ", ".join(f"%{name}: {self.types[name]}" for name, *_ in arguments)

    def size(self, d):
        return d if isinstance(d, int) else self.sizes[d]

    def type(self, shape, dtype="f32"):
        return "tensor<" + "".join("?x" if d in self.dynamic else f"{self.size(d)}x" for d in shape) + dtype + ">"

    def line(self, text, t):
        self.count += 1
        self.lines.append(f"    %v{self.count} = {text}")
        self.types[f"v{self.count}"] = t
        return f"v{self.count}"

    def shape(self, shape):
        """Return an SSA value with the sizes of ``shape``."""
        parts = []
        for d in shape:
            if d in self.dynamic:
                name, axis = self.places[d]
                kind = self.types[name]
                size = f"stablehlo.get_dimension_size %{name}, dim = {axis} : ({kind}) -> tensor<i32>"
                v = self.line(size, "")
                parts.append(self.line(f"stablehlo.reshape %{v} : (tensor<i32>) -> tensor<1xi32>", ""))
            else:
                parts.append(self.line(f"stablehlo.constant dense<{self.size(d)}> : tensor<1xi32>", ""))
        t = f"tensor<{len(shape)}xi32>"
        if len(parts) == 1:
            return parts[0], t
        args, kinds = ", ".join(f"%{p}" for p in parts), ", ".join(["tensor<1xi32>"] * len(parts))
        return self.line(f"stablehlo.concatenate {args}, dim = 0 : ({kinds}) -> {t}", ""), t

    def spread(self, v, dims, shape, dtype):
        held, t = self.shape(shape)
        to = self.type(shape, dtype)
        text = f"stablehlo.dynamic_broadcast_in_dim %{v}, %{held}, dims = {list(dims)}"
        return self.line(f"{text} : ({self.types[v]}, {t}) -> {to}", to)

    def reshape(self, v, shape, dtype, to=None):
        held, t = self.shape(shape)
        to = to or self.type(shape, dtype)
        return self.line(f"stablehlo.dynamic_reshape %{v}, %{held} : ({self.types[v]}, {t}) -> {to}", to)

    def flat(self, v, shape, dtype):
        """Return ``v`` with its first two dims collapsed into one, whose size is computed as a product."""
        sizes = [self.shape((d,))[0] for d in shape[:2]]
        joined = self.line(f"stablehlo.multiply %{sizes[0]}, %{sizes[1]} : tensor<1xi32>", "")
        rest = [self.shape((d,))[0] for d in shape[2:]]
        t = f"tensor<{len(shape) - 1}xi32>"
        args = ", ".join(f"%{p}" for p in [joined, *rest])
        kinds = ", ".join(["tensor<1xi32>"] * (len(rest) + 1))
        held = self.line(f"stablehlo.concatenate {args}, dim = 0 : ({kinds}) -> {t}", "") if rest else joined
        first = "?" if set(shape[:2]) & self.dynamic else str(self.size(shape[0]) * self.size(shape[1]))
        tail = "".join("?x" if d in self.dynamic else f"{self.size(d)}x" for d in shape[2:])
        to = f"tensor<{first}x{tail}{dtype}>"
        return self.line(f"stablehlo.dynamic_reshape %{v}, %{held} : ({self.types[v]}, {t}) -> {to}", to)

    def iota(self, shape, dim, dtype):
        held, t = self.shape(shape)
        to = self.type(shape, dtype)
        return self.line(f"stablehlo.dynamic_iota %{held}, dim = {dim} : ({t}) -> {to}", to)

    def both(self, name, a, b, to=None):
        return self.line(f"stablehlo.{name} %{a}, %{b} : {self.types[a]}", to or self.types[a])

    def module(self, result):
        t = self.types[result]
        head = f"  func.func public @main({self.header}) -> {t} {{"
        return "\n".join(["module {", head, *self.lines, f"    return %{result} : {t}", "  }", "}"])


def scatter_text(dynamic: frozenset[str], sizes: Mapping[str, int]) -> str:
    """Return the program that adds ``u[t, j]`` to ``x[t, i[t, j]]``, both vectors of features."""
    arguments = [
        ("x", ("tokens", "experts", "features"), "f32"), ("i", ("tokens", "k"), "i32"),
        ("u", ("tokens", "k", "features"), "f32"),
    ]  # fmt: skip
    p = Text(dynamic, sizes, arguments)
    rows = p.spread(p.iota(("tokens",), 0, "i32"), [0], ("tokens", "k", 1), "i32")
    columns = p.reshape("i", ("tokens", "k", 1), "i32")
    to = p.type(("tokens", "k", 2), "i32")
    kinds = f"({p.types[rows]}, {p.types[columns]}) -> {to}"
    places = p.line(f"stablehlo.concatenate %{rows}, %{columns}, dim = 2 : {kinds}", to)
    numbers = (
        "update_window_dims = [2], inserted_window_dims = [0, 1], scatter_dims_to_operand_dims = [0, 1], "
        "index_vector_dim = 2"
    )
    text = (
        f'"stablehlo.scatter"(%x, %{places}, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<{numbers}>}}> ({{\n'
        "    ^bb0(%a: tensor<f32>, %b: tensor<f32>):\n      %s = stablehlo.add %a, %b : tensor<f32>\n"
        "      stablehlo.return %s : tensor<f32>\n"
        f"    }}) : ({p.types['x']}, {to}, {p.types['u']}) -> {p.types['x']}"
    )
    return p.module(p.line(text, p.types["x"]))


def one_hot_text(dynamic: frozenset[str], sizes: Mapping[str, int]) -> str:
    """Return the program that sums ``one_hot(i) * gate`` times rows over k, with experts as the first, flat dim."""
    arguments = [
        ("i", ("tokens", "k"), "i32"), ("gate", ("tokens", "k"), "f32"), ("u", ("tokens", "k", "features"), "f32"),
        ("bias", ("experts",), "f32"),
    ]  # fmt: skip
    p = Text(dynamic, sizes, arguments)
    cube = ("tokens", "k", "experts")
    wanted = p.spread("i", [0, 1], cube, "i32")
    same = f"stablehlo.compare EQ, %{wanted}, %{p.iota(cube, 2, 'i32')} : ({p.types[wanted]}, {p.types[wanted]})"
    hit = p.line(f"{same} -> {p.type(cube, 'i1')}", p.type(cube, "i1"))
    hot = p.line(f"stablehlo.convert %{hit} : ({p.types[hit]}) -> {p.type(cube)}", p.type(cube))
    gated = p.both("multiply", hot, p.spread("gate", [0, 1], cube, "f32"))
    full = ("tokens", "k", "experts", "features")
    rows = p.both("multiply", p.spread(gated, [0, 1, 2], full, "f32"), p.spread("u", [0, 1, 3], full, "f32"))
    zero = p.line("stablehlo.constant dense<0.0> : tensor<f32>", "tensor<f32>")
    to = p.type(("tokens", "experts", "features"))
    reduce = f"stablehlo.reduce(%{rows} init: %{zero}) applies stablehlo.add across dimensions = [1]"
    total = p.line(f"{reduce} : ({p.types[rows]}, tensor<f32>) -> {to}", to)
    biased = p.both("add", total, p.spread("bias", [1], ("tokens", "experts", "features"), "f32"))
    to = p.type(("experts", "tokens", "features"))
    transposed = p.line(f"stablehlo.transpose %{biased}, dims = [1, 0, 2] : ({p.types[biased]}) -> {to}", to)
    return p.module(p.flat(transposed, ("experts", "tokens", "features"), "f32"))


def scatter_arrays(sizes: Mapping[str, int], seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Return arguments and result of :func:`scatter_text`; whole numbers, so that sums in any order are exact."""
    rng = np.random.default_rng(seed)
    t, e, k, f = (sizes[d] for d in DIMS)
    x = rng.integers(-9, 9, (t, e, f)).astype(np.float32)
    i = rng.integers(-1, e + 1, (t, k)).astype(np.int32)
    u = rng.integers(-9, 9, (t, k, f)).astype(np.float32)
    wanted = x.astype(np.float64)
    for row in range(t):
        for j in range(k):
            if 0 <= i[row, j] < e:
                wanted[row, i[row, j]] += u[row, j]
    return [x, i, u], wanted.astype(np.float32)


def one_hot_arrays(sizes: Mapping[str, int], seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Return arguments and result of :func:`one_hot_text`."""
    rng = np.random.default_rng(seed)
    t, e, k, f = (sizes[d] for d in DIMS)
    i = rng.integers(-1, e + 1, (t, k)).astype(np.int32)
    gate = rng.integers(-4, 4, (t, k)).astype(np.float32)
    u = rng.integers(-9, 9, (t, k, f)).astype(np.float32)
    bias = rng.integers(-4, 4, e).astype(np.float32)
    hot = (i[..., None] == np.arange(e)) * gate[..., None].astype(np.float64)
    total = np.einsum("tke,tkf->etf", hot, u) + bias[:, None, None]
    return [i, gate, u, bias], total.reshape(e * t, f).astype(np.float32)


PROGRAMS = {"scatter": (scatter_text, scatter_arrays), "one_hot": (one_hot_text, one_hot_arrays)}
