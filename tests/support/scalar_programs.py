"""StableHLO programs with one scalar function after a matmul, convolution, attention score or reduction.

A template computes ``%p`` from its arguments. For each scalar function of the op table there is a program whose result
is that function of ``%p``, or of ``%p`` converted to another dtype, and of an argument ``%r`` if it has two operands.
"""

from dataclasses import dataclass

from aotc.frontend.importers.elementwise import CHLO, COMPLEX_CHLO, DIRECT
from aotc.ir.opset.elementwise_scalars import SCALARS
from aotc.vmfb.dtypes import DTYPES, kind_of

_NAMES = {ours: theirs for theirs, ours in {**CHLO, **COMPLEX_CHLO, **DIRECT}.items()}
_REAL, _COMPLEX = {"c64": "f32", "c128": "f64"}, {"f32": "c64", "f64": "c128"}
_SIX_BITS = frozenset({"f6E2M3FN", "f6E3M2FN"})  # no other dtype is a whole number of them
_SIGNED_ONLY = frozenset({"abs", "sign"})  # StableHLO has neither on unsigned integers


def tensor(shape, dtype):
    """Return the text of a tensor type."""
    element = {"c64": "complex<f32>", "c128": "complex<f64>"}.get(
        dtype, dtype.replace("u", "ui") if dtype[0] == "u" else dtype
    )
    return f"tensor<{''.join(f'{n}x' for n in shape)}{element}>"


@dataclass(frozen=True)
class Template:
    """Lines that compute ``%p``, with the arguments, dtype and shape of ``%p``, and lines after ``%o``.

    With ``after`` the function's result ``%o`` has the shape of ``%p``, and the program returns ``%y`` of type
    ``result``.
    """

    lines: tuple
    arguments: tuple
    dtype: str
    shape: tuple
    after: tuple = ()
    result: str = ""


def matmul(dtype, out="", rows=128, precision=""):
    out, shape = out or dtype, (rows, 128)
    a, b = tensor((rows, 64), dtype), tensor((64, 128), dtype)
    types = f"({a}, {b}) -> {tensor(shape, out)}"
    line = f"%p = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]{precision} : {types}"
    return Template((line,), (("a", a), ("b", b)), out, shape)


def convolution(dtype, out=""):
    out, shape = out or dtype, (2, 16, 16, 64)
    a, b = tensor((2, 16, 16, 32), dtype), tensor((3, 3, 32, 64), dtype)
    line = (
        "%p = stablehlo.convolution(%a, %b) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], "
        "window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : "
        f"({a}, {b}) -> {tensor(shape, out)}"
    )
    return Template((line,), (("a", a), ("b", b)), out, shape)


def total(dtype, dim):
    shape, sizes = (64,), ((300, 64), (64, 300))[dim]
    zero = "0" if dtype[0] in "iu" else "0.0"
    lines = (
        f"%z = stablehlo.constant dense<{zero}> : {tensor((), dtype)}",
        f"%p = stablehlo.reduce(%a init: %z) applies stablehlo.add across dimensions = [{dim}] : "
        f"({tensor(sizes, dtype)}, {tensor((), dtype)}) -> {tensor(shape, dtype)}",
    )
    return Template(lines, (("a", tensor(sizes, dtype)),), dtype, shape)


def score(dtype, queries):
    """Return the template of attention whose scores are ``%p`` plus the function's result."""
    own, keys, scores, row = (4, queries, 64), (4, 128, 64), (4, queries, 128), (4, queries)
    q, k, p, r = tensor(own, dtype), tensor(keys, dtype), tensor(scores, "f32"), tensor(row, "f32")
    batched = "stablehlo.dot_general %{}, %{}, batching_dims = [0] x [0], contracting_dims = [2] x [{}]"
    by_row = f"across dimensions = [2] : ({p}, tensor<f32>) -> {r}"
    line = f"%p = {batched.format('a', 'b', 2)} : ({q}, {k}) -> {p}"
    after = (
        f"%s = stablehlo.add %of, %p : {p}",
        "%low = stablehlo.constant dense<0xFF800000> : tensor<f32>",
        "%zero = stablehlo.constant dense<0.0> : tensor<f32>",
        f"%m = stablehlo.reduce(%s init: %low) applies stablehlo.maximum {by_row}",
        f"%mb = stablehlo.broadcast_in_dim %m, dims = [0, 1] : ({r}) -> {p}",
        f"%d = stablehlo.subtract %s, %mb : {p}\n%e = stablehlo.exponential %d : {p}",
        f"%t = stablehlo.reduce(%e init: %zero) applies stablehlo.add {by_row}",
        f"%tb = stablehlo.broadcast_in_dim %t, dims = [0, 1] : ({r}) -> {p}\n%w = stablehlo.divide %e, %tb : {p}",
        f"%ws = stablehlo.convert %w : ({p}) -> {tensor(scores, dtype)}",
        f"%y = {batched.format('ws', 'v', 1)} : ({tensor(scores, dtype)}, {k}) -> {q}",
    )
    return Template((line,), (("a", q), ("b", k), ("v", k)), "f32", scores, after, q)


TEMPLATES = {
    **{f"matmul {d}": matmul(d) for d in ("bf16", "f16", "f32", "f64", "i32", "c64", "f8E4M3FN")},
    "matmul i8": matmul("i8", "i32"),
    "matmul bf16 to f32": matmul("bf16", "f32"),
    "matmul f8 to f32": matmul("f8E4M3FN", "f32"),
    "exact matmul f32": matmul("f32", precision=", precision = [HIGHEST, HIGHEST]"),
    "few rows bf16": matmul("bf16", rows=4),
    "one row f32": matmul("f32", rows=1),
    **{f"convolution {d}": convolution(d) for d in ("bf16", "f16", "f32", "f64")},
    "convolution i8": convolution("i8", "i32"),
    **{f"rows {d}": total(d, 1) for d in ("f32", "f16", "i32")},
    **{f"columns {d}": total(d, 0) for d in ("f32", "f16", "i32")},
    "score bf16": score("bf16", 128),
    "score f16": score("f16", 128),
    "score of few queries": score("bf16", 4),
}


def programs(template, dtype=""):
    """Return a program for each scalar function, by its name, on the value of ``template`` in ``dtype``."""
    made = TEMPLATES[template]
    dtype = dtype or made.dtype
    found = {}
    for name, lines, result in [*_functions(dtype, made.shape), *_conversions(dtype, made.shape)]:
        q = "%p" if dtype == made.dtype else "%q"
        body = list(made.lines)
        if dtype != made.dtype:
            body.append(
                f"%q = stablehlo.convert %p : ({tensor(made.shape, made.dtype)}) -> {tensor(made.shape, dtype)}"
            )
        arguments = [*made.arguments, *([("r", tensor(made.shape, dtype))] if any("%r" in x for x in lines) else [])]
        body += [line.replace("%q", q) for line in lines]
        value, kind = "%o", tensor(*result)
        if made.after:
            if result[0] != made.shape or result[1] in _REAL:
                continue
            body += [f"%of = stablehlo.convert %o : ({kind}) -> {tensor(made.shape, made.dtype)}", *made.after]
            value, kind = "%y", made.result
        head = ", ".join(f"%{n}: {t}" for n, t in arguments)
        found[name] = "\n".join(
            (f"func.func public @f_{name}({head}) -> {kind} {{", *body, f"return {value} : {kind}\n}}")
        )
    return found


def _functions(dtype, shape):
    t = tensor(shape, dtype)
    for row in SCALARS.values():
        if row.of_loops or row.name == "convert" or kind_of(dtype) not in row.kinds:
            continue
        if (row.result == "complex" and dtype not in _COMPLEX) or (row.name in _SIGNED_ONLY and dtype[0] == "u"):
            continue
        if row.name == "select":
            test = f"%c = stablehlo.compare EQ, %q, %r : ({t}, {t}) -> {tensor(shape, 'i1')}"
            yield row.name, [test, f"%o = stablehlo.select %c, %q, %r : {tensor(shape, 'i1')}, {t}"], (shape, dtype)
        elif row.symbol and row.result == "bool":
            order = ", TOTALORDER" if row.total else ""
            direction = row.name.split("_")[0].upper()
            line = f"%o = stablehlo.compare {direction}, %q, %r{order} : ({t}, {t}) -> {tensor(shape, 'i1')}"
            yield row.name, [line], (shape, "i1")
        else:
            names = {"bool": "i1", "real": _REAL.get(dtype, dtype), "complex": _COMPLEX.get(dtype)}
            result = (shape, names.get(row.result, dtype))
            taken = ", ".join(("%q", "%r")[: row.arity])
            types = ", ".join([t] * row.arity)
            yield row.name, [f'%o = "{_NAMES[row.name]}"({taken}) : ({types}) -> {tensor(*result)}'], result


def _conversions(dtype, shape):
    """Yield the conversions to every dtype, bitcasts to dtypes of any width, and roundings to fewer bits."""
    t, bits = tensor(shape, dtype), DTYPES[dtype].bits
    for to, row in DTYPES.items():
        if kind_of(dtype) == "c" and row.kind != "c":
            continue
        yield f"to_{to}", [f"%o = stablehlo.convert %q : ({t}) -> {tensor(shape, to)}"], (shape, to)
        if {kind_of(dtype), row.kind} & set("bc") or (bits != row.bits and {dtype, to} & _SIX_BITS):
            continue
        source, lines, whole = t, [], shape
        if bits > row.bits:
            whole = (*shape, bits // row.bits)
        elif bits < row.bits:
            parts = row.bits // bits
            whole = (*shape[:-1], shape[-1] // parts)
            source = tensor((*whole, parts), dtype)
            lines = [f"%u = stablehlo.reshape %q : ({t}) -> {source}"]
        cast = f"%o = stablehlo.bitcast_convert {'%u' if lines else '%q'} : ({source}) -> {tensor(whole, to)}"
        yield f"bits_{to}", [*lines, cast], (whole, to)
    if kind_of(dtype) == "f":
        yield "reduce_precision", [f"%o = stablehlo.reduce_precision %q, format = e5m7 : {t}"], (shape, dtype)
