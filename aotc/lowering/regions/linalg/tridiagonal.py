"""Lower ``tridiagonal_solve_perturbed``: elimination with pivoting that perturbs pivots of singular matrices.

The method is that of LAPACK's xLAGTF and xLAGTS, used by inverse iteration. A pivot that would make the solution
overflow is moved away from 0 by multiples of the rounding error of the largest element.
"""

from __future__ import annotations

import ast
from textwrap import indent

import numpy as np

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.lowering.analysis.index_maps import delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.plans.single_ops import TridiagonalPlan
from aotc.lowering.threshold import Estimate
from aotc.vmfb.dtypes import real_of, to_numpy

# Template for one matrix. H is the index of the batch; T and R are the dtypes of elements and of their real parts.
_BODY = """
u = scratch("T[N, 3]")
row = scratch("T[M]")
most = private("R[]")
scale = private("R[]")
pivot = private("T[]")
step = private("R[]")
large = private("R[]")
going = private("i1[]")
u[0, 0] = a1[H, 0]
u[0, 1] = select(index(N) > i64(1), a2[H, 0], ZERO)
u[0, 2] = ZERO
most[()] = max(abs(u[0, 0]), abs(u[0, 1]))
scale[()] = abs(u[0, 0]) + abs(u[0, 1])
for j in range(0, M):
    o0[H, 0, j] = a3[H, 0, j]
for k in range(0, N - 1):
    low = a0[H, k + 1]
    own = a1[H, k + 1]
    up = select(index(k) < index(N - 2), a2[H, k + 1], ZERO)
    next_scale = (abs(low) + abs(own)) + abs(up)
    first = abs(u[k, 0])
    here = select(first == R(0.0), R(0.0), div(first, scale[()]))
    below = div(abs(low), next_scale)
    none = low == ZERO
    if none | (below <= here):
        factor = select(none, ZERO, div(low, u[k, 0]))
        scale[()] = next_scale
        u[k + 1, 0] = own - (factor * u[k, 1])
        u[k + 1, 1] = up
        u[k, 2] = ZERO
        for j in range(0, M):
            o0[H, k + 1, j] = a3[H, k + 1, j] - (factor * o0[H, k, j])
    else:
        factor = div(u[k, 0], low)
        u[k + 1, 0] = u[k, 1] - (factor * own)
        u[k, 0] = low
        u[k, 1] = own
        u[k, 2] = up
        u[k + 1, 1] = -(factor * up)
        for j in range(0, M):
            old = o0[H, k, j]
            o0[H, k + 1, j] = old - (factor * a3[H, k + 1, j])
            o0[H, k, j] = a3[H, k + 1, j]
        scale[()] = abs(u[k + 1, 0]) + abs(u[k + 1, 1])
    if index(k) < index(N - 2):
        most[()] = max(max(most[()], abs(u[k, 0])), max(abs(u[k, 1]), abs(u[k, 2])))
most[()] = max(most[()], abs(u[N - 1, 0]))
for s in range(0, N):
    large[()] = R(0.0)
    for j in range(0, M):
        row[j] = o0[H, N - 1 - s, j]
    if index(s) > i64(0):
        for j in range(0, M):
            row[j] = row[j] - (u[N - 1 - s, 1] * o0[H, N - s, j])
    if index(s) > i64(1):
        for j in range(0, M):
            row[j] = row[j] - (u[N - 1 - s, 2] * o0[H, N - s + 1, j])
    for j in range(0, M):
        large[()] = max(large[()], abs(row[j]))
    pivot[()] = u[N - 1 - s, 0]
    size = max(R(EPSILON) * most[()], R(SMALLEST))
    step[()] = select(bitcast(REAL(pivot[()]), "BITS") < BITS(0), -size, size)
    going[()] = abs(pivot[()]) < R(1.0)
    while True:
        if not going[()]:
            break
        now = abs(pivot[()])
        tiny = now < R(SMALLEST)
        lost = tiny & ((now == R(0.0)) | ((large[()] * R(SMALLEST)) > now))
        if lost | ((~tiny) & (large[()] > (now * R(LARGEST)))):
            pivot[()] = pivot[()] + WHOLE(step[()])
            step[()] = step[()] * R(2.0)
            going[()] = abs(pivot[()]) < R(1.0)
        else:
            if tiny:
                pivot[()] = pivot[()] * WHOLE(R(LARGEST))
                for j in range(0, M):
                    row[j] = row[j] * WHOLE(R(LARGEST))
            going[()] = i1(False)
    inverse = div(WHOLE(R(1.0)), pivot[()])
    for j in range(0, M):
        o0[H, N - 1 - s, j] = row[j] * inverse
"""


TRIDIAGONAL_WORK = Estimate(20, "scalar operations counted per row and right-hand side")


def lower_tridiagonal_solve(b: RegionBuilder, plan: TridiagonalPlan) -> Kernel:
    """Lower a tridiagonal solve to a kernel, from a text template with this op's sizes."""
    out = b.outputs[0]
    *batch, n, m = out.shape
    if n == 0 or m == 0:
        return b.kernel(1, (), 0)
    matrices = product(batch)
    head = [*map(str, delinearize(grid_item(matrices), batch))]
    header = print_kernel(b.kernel(matrices, (), matrices * n * m * TRIDIAGONAL_WORK.value)).replace("    pass\n", "")
    loop = f"    for p in parallel(0, {matrices}):\n" if matrices != 1 else ""
    body = _tridiagonal_kernel_text(out.dtype, n, m, head)
    if not isinstance(n, int):  # the first row is not in a loop: an empty matrix would be read out of bounds
        body = f"if index({n}) > i64(0):\n" + indent(body, "    ")
    return parse_kernel(header + loop + indent(body, "        " if loop else "    "))


def _tridiagonal_kernel_text(dtype: str, n: Dim, m: Dim, head: list[str]) -> str:
    """Return the kernel's text with an op's types and sizes filled into the template."""
    real = real_of(dtype)
    facts = np.finfo(to_numpy(real))
    whole = real == dtype
    names: dict[str, ast.expr] = {
        "N": _parse_template_expression(str(n)),
        "M": _parse_template_expression(str(m)),
        "SMALLEST": _parse_template_expression(repr(float(facts.tiny))),
        "LARGEST": _parse_template_expression(repr(float(1 / facts.tiny))),
        "EPSILON": _parse_template_expression(repr(float(facts.eps))),
        "ZERO": _parse_template_expression(f"{dtype}(0.0)" if whole else f"{dtype}(0.0, 0.0)"),
    }
    text = _BODY.replace('"T[', f'"{dtype}[').replace('"R[', f'"{real}[').replace('"BITS"', f'"i{facts.bits}"')
    text = text.replace("[N, 3]", f"[{n}, 3]").replace("[M]", f"[{m}]")
    tree = _TemplateSubstitution(
        names, {"T": dtype, "R": real, "BITS": f"i{facts.bits}"}, head, real if not whole else ""
    )
    return ast.unparse(ast.fix_missing_locations(tree.visit(ast.parse(text)))) + "\n"


def _parse_template_expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class _TemplateSubstitution(ast.NodeTransformer):
    """Replace the names in the template by the names and types of an op."""

    def __init__(self, names: dict[str, ast.expr], types: dict[str, str], head: list[str], part: str) -> None:
        self.names, self.types, self.head, self.part = names, types, head, part

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.types:
            return ast.Name(self.types[node.id], node.ctx)
        return self.names.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace ``WHOLE(x)`` by a complex number and ``REAL(x)`` by a real part; both are ``x`` for real dtypes."""
        self.generic_visit(node)
        match node.func, node.args:
            case ast.Name(id="WHOLE"), [value]:
                return (
                    _parse_template_expression(f"complex({ast.unparse(value)}, {self.part}(0.0))")
                    if self.part
                    else value
                )
            case ast.Name(id="REAL"), [value]:
                return _parse_template_expression(f"real({ast.unparse(value)})") if self.part else value
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace ``H`` in an index by the index of the system in the batch."""
        self.generic_visit(node)
        match node.slice:
            case ast.Tuple(elts=[ast.Name(id="H"), *rest]):
                node.slice = ast.Tuple([*map(_parse_template_expression, self.head), *rest], ast.Load())
        return node
