"""What jax does not emit of CHLO and of the legacy ops: broadcasting, einsum, torch_index_select, scan, placements."""

import numpy as np
import pytest
from support.checklists.checklist import module
from support.checklists.checklist_all import CASES

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla
from aotc.ir.semantics.run import interpret

pytestmark = pytest.mark.cpu

X = np.random.default_rng(0).uniform(1, 4, (2, 4)).astype(np.float32)
ROW, COLUMN = X[1], X[:, 1]
SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)


def written(body, result, args):
    types = [f"%{name}: {text}" for name, (text, _) in args.items()]
    return f"func.func @main({', '.join(types)}) -> {result} {{\n {body}\n return %y : {result}\n}}".encode()


def check(body, result, args, expected, rtol=0.0):
    """Compile ``%y`` of ``body`` at two levels and run the reference: all must give ``expected``."""
    text, values = written(body, result, args), [v for _, v in args.values()]
    found = [interpret(import_model(text), *values)[0]]
    for level in (0, 2):
        module = aotc.load(aotc.compile(text, opt_level=level, verify_each=True))
        found.append(module.invoke("main", *values)[0])
    for got in found:
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=rtol)


BINARY = {
    "add": np.add, "atan2": np.arctan2, "divide": np.divide, "maximum": np.maximum, "minimum": np.minimum,
    "multiply": np.multiply, "next_after": np.nextafter, "power": np.power, "remainder": np.fmod,
    "subtract": np.subtract,
}  # fmt: skip
BITS = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift, "shift_right_logical": np.right_shift,
}  # fmt: skip
PLACES = "{broadcast_dimensions = array<i64: 0>}"


@pytest.mark.parametrize("name", BINARY)
def test_broadcast_float_ops_match_numpy(name):
    args = {"x": ("tensor<4xf32>", ROW), "z": ("tensor<2x4xf32>", X)}
    body = f"%y = chlo.broadcast_{name} %x, %z : (tensor<4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>"
    check(body, "tensor<2x4xf32>", args, BINARY[name](ROW, X), rtol=3e-7)


@pytest.mark.parametrize("name", BITS)
def test_broadcast_integer_ops_match_numpy(name):
    a, b = np.int32([[1], [200]]), np.int32([3, 1, 4])
    args = {"x": ("tensor<2x1xi32>", a), "z": ("tensor<3xi32>", b)}
    body = f"%y = chlo.broadcast_{name} %x, %z : (tensor<2x1xi32>, tensor<3xi32>) -> tensor<2x3xi32>"
    check(body, "tensor<2x3xi32>", args, BITS[name](a, b))


def test_broadcast_dimensions_place_the_smaller_operand():
    args = {"x": ("tensor<2xf32>", COLUMN), "z": ("tensor<2x4xf32>", X)}
    body = f"%y = chlo.broadcast_subtract %x, %z {PLACES} : (tensor<2xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>"
    check(body, "tensor<2x4xf32>", args, COLUMN[:, None] - X)


def test_broadcast_compare_complex_and_select_match_numpy():
    args = {"x": ("tensor<2x4xf32>", X), "z": ("tensor<4xf32>", ROW), "p": ("tensor<i1>", np.array(False))}
    two = "(tensor<2x4xf32>, tensor<4xf32>)"
    body = f"%y = chlo.broadcast_compare %x, %z {{comparison_direction = #chlo<comparison_direction LT>}} : {two}"
    check(f"{body} -> tensor<2x4xi1>", "tensor<2x4xi1>", args, X < ROW)
    body = f"%y = chlo.broadcast_complex %x, %z : {two} -> tensor<2x4xcomplex<f32>>"
    check(body, "tensor<2x4xcomplex<f32>>", args, X + 1j * ROW)
    three = "(tensor<i1>, tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>"
    check(f"%y = chlo.broadcast_select %p, %x, %z : {three}", "tensor<2x4xf32>", args, np.broadcast_to(ROW, (2, 4)))


@pytest.mark.parametrize(("name", "first"), [("zeta", 1.0), ("polygamma", 0.0)])
def test_broadcast_zeta_and_polygamma_match_scipy(name, first):
    from scipy import special

    s = np.float64([[first + 1], [first + 2]])
    q = np.float64([1.5, 2.5, 7])
    args = {"x": ("tensor<2x1xf64>", s), "z": ("tensor<3xf64>", q)}
    body = f"%y = chlo.broadcast_{name} %x, %z : (tensor<2x1xf64>, tensor<3xf64>) -> tensor<2x3xf64>"
    check(body, "tensor<2x3xf64>", args, getattr(special, name)(s if name == "zeta" else s.astype(int), q), rtol=1e-13)


@pytest.mark.parametrize("rows", [1, 3])
def test_broadcasts_of_unknown_sizes_are_checked_at_the_call(rows):
    """Sizes that are not known must be equal, or 1; this is checked when the program is called."""
    text = (
        "func.func @main(%x: tensor<?x4xf32>, %z: tensor<4xf32>, %w: tensor<?x1xf32>) -> tensor<?x4xf32> {\n"
        " %0 = chlo.broadcast_add %x, %z : (tensor<?x4xf32>, tensor<4xf32>) -> tensor<?x4xf32>\n"
        " %y = chlo.broadcast_multiply %0, %w : (tensor<?x4xf32>, tensor<?x1xf32>) -> tensor<?x4xf32>\n"
        " return %y : tensor<?x4xf32>\n}"
    )
    module = aotc.load(aotc.compile(text.encode()))
    x, w = np.ones((rows, 4), np.float32), np.arange(rows, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(module.invoke("main", x, ROW, w)[0], (x + ROW) * w)
    more = np.arange(rows + 1, dtype=np.float32)[:, None]
    if rows == 1:
        np.testing.assert_array_equal(module.invoke("main", x, ROW, more)[0], (x + ROW) * more)
        return
    with pytest.raises(Exception, match=r"sizes 3 and 4 cannot be broadcast together \(dimension 0 of arg0 is"):
        module.invoke("main", x, ROW, more)


def test_different_sizes_are_refused():
    text = (
        "func.func @main(%x: tensor<2x4xf32>, %z: tensor<3xf32>) -> tensor<2x?xf32> {\n"
        " %y = chlo.broadcast_add %x, %z : (tensor<2x4xf32>, tensor<3xf32>) -> tensor<2x?xf32>\n"
        " return %y : tensor<2x?xf32>\n}"
    )
    with pytest.raises(CompileError):
        aotc.compile(text.encode())


A, B = (np.random.default_rng(n).integers(-3, 4, s).astype(np.float32) for n, s in enumerate([(2, 3, 4), (2, 4, 5)]))


@pytest.mark.parametrize(
    ("config", "result"),
    [("bij,bjk->bik", "2x3x5"), ("bij,bjk->kib", "5x3x2"), ("bij,cjk->ik", "3x5"), ("bij,bjk->", ""),
     ("...ij,...jk->...ik", "2x3x5"), ("bij,cdk->bc", "2x2")],
)  # fmt: skip
def test_einsum_matches_numpy(config, result):
    t = f"tensor<{result}{'x' if result else ''}f32>"
    body = f'%y = "stablehlo.einsum"(%a, %b) {{einsum_config = "{config}"}} : (tensor<2x3x4xf32>, tensor<2x4x5xf32>)'
    args = {"a": ("tensor<2x3x4xf32>", A), "b": ("tensor<2x4x5xf32>", B)}
    check(f"{body} -> {t}", t, args, np.einsum(config, A, B))


@pytest.mark.parametrize(
    ("config", "result"), [("ij->ji", "3x3"), ("ij->j", "3"), ("ii->i", "3"), ("ii->", ""), ("...->...", "3x3")]
)
def test_unary_einsum_matches_numpy(config, result):
    t = f"tensor<{result}{'x' if result else ''}f32>"
    body = f'%y = "stablehlo.unary_einsum"(%a) {{einsum_config = "{config}"}} : (tensor<3x3xf32>) -> {t}'
    check(body, t, {"a": ("tensor<3x3xf32>", SQUARE)}, np.asarray(np.einsum(config, SQUARE)))


def test_einsum_with_an_unknown_label_is_refused():
    text = (
        "func.func @main(%a: tensor<3x3xf32>) -> tensor<3x3xf32> {\n"
        '%y = "stablehlo.unary_einsum"(%a) {einsum_config = "ij->ik"} : (tensor<3x3xf32>) -> tensor<3x3xf32>\n'
        " return %y : tensor<3x3xf32>\n}"
    )
    with pytest.raises(CompileError, match="each label of the result"):
        aotc.compile(text.encode())


def test_torch_index_select_matches_numpy():
    places = np.int32([[2, 0], [1, 1]])
    args = {"x": ("tensor<2x3x4xf32>", A), "i": ("tensor<2x2xi32>", places)}
    body = '%y = "stablehlo.torch_index_select"(%x, %i) {{dim = {} : i64, batch_dims = {} : i64}} : {}'
    types = "(tensor<2x3x4xf32>, tensor<2x2xi32>) -> tensor<{}xf32>"
    shape = "2x2x2x4"
    check(body.format(1, 0, types.format(shape)), f"tensor<{shape}xf32>", args, np.take(A, places, 1))
    expected = np.stack([A[n][:, places[n]] for n in range(2)])
    check(body.format(2, 1, types.format("2x3x2")), "tensor<2x3x2xf32>", args, expected)


@pytest.mark.parametrize("reverse", ["false", "true"])
def test_chlo_scan_matches_numpy(reverse, capfd):
    """Two inputs, one carry; the last output is the carry. jaxlib's own pass forgets ``is_reverse``.

    It has no portable form, which is no error: nothing is told of it.
    """
    body = f"""%y, %c = chlo.scan(%x, %w) inits(%i) dimension=1 attributes {{is_reverse = {reverse}}} {{
    ^bb0(%p: tensor<2xf32>, %q: tensor<2xf32>, %s: tensor<2xf32>):
      %m = stablehlo.multiply %p, %q : tensor<2xf32>
      %n = stablehlo.add %m, %s : tensor<2xf32>
      stablehlo.return %s, %n : tensor<2xf32>, tensor<2xf32>
    }} : (tensor<2x4xf32>, tensor<2x4xf32>, tensor<2xf32>) -> (tensor<2x4xf32>, tensor<2xf32>)"""
    start = np.float32([10, 20])
    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    rows = whole[:, ::-1] if reverse == "true" else whole
    sums = start[:, None] + np.cumsum(rows * rows, 1) - rows * rows
    args = dict.fromkeys("xw", ("tensor<2x4xf32>", whole)) | {"i": ("tensor<2xf32>", start)}
    check(body, "tensor<2x4xf32>", args, (sums[:, ::-1] if reverse == "true" else sums).astype(np.float32))
    assert "error" not in capfd.readouterr().err


def test_bitcasts_of_complex_numbers_match_numpy():
    z = np.array([1 + 2j, -0.5 + 3e10j])
    args = {"x": ("tensor<2xcomplex<f64>>", z)}
    body = "%y = stablehlo.bitcast_convert %x : (tensor<2xcomplex<f64>>) -> tensor<2x2xcomplex<f32>>"
    check(body, "tensor<2x2xcomplex<f32>>", args, z.view(np.complex64).reshape(2, 2))
    args = {"x": ("tensor<2x2xcomplex<f32>>", z.view(np.complex64).reshape(2, 2))}
    body = "%y = stablehlo.bitcast_convert %x : (tensor<2x2xcomplex<f32>>) -> tensor<2xcomplex<f64>>"
    check(body, "tensor<2xcomplex<f64>>", args, z)


RAGGED = (
    "%y = stablehlo.custom_call @ragged_all_to_all(%x, %o, %s, %n, %t, %n) {backend_config = {replica_groups = "
    "dense<%GROUPS> : tensor<1x%COUNTxi64>}, api_version = 4 : i32} : (tensor<6x2xf32>, tensor<8x2xf32>, "
    "tensor<2xi32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> tensor<8x2xf32>"
)


def test_ragged_all_to_all_of_one_process_copies_slices():
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    into = np.full((8, 2), -1, np.float32)
    expected = into.copy()
    expected[3:5], expected[0:1] = x[1:3], x[4:5]
    sizes = {"s": [1, 4], "n": [2, 1], "t": [3, 0]}
    args = {"x": ("tensor<6x2xf32>", x), "o": ("tensor<8x2xf32>", into)}
    args |= {name: ("tensor<2xi32>", np.int32(v)) for name, v in sizes.items()}
    alone = RAGGED.replace("%GROUPS", "[[0]]").replace("%COUNT", "1")
    check(alone, "tensor<8x2xf32>", args, expected)
    with pytest.raises(CompileError, match="ragged_all_to_all exchanges between 2 processes"):
        aotc.compile(written(RAGGED.replace("%GROUPS", "[[0, 1]]").replace("%COUNT", "2"), "tensor<8x2xf32>", args))


@pytest.mark.parametrize("line", [
    '%y = "stablehlo.all_reduce"(%x) ({ ^bb0(%p: tensor<f32>, %q: tensor<f32>):\n stablehlo.return %q : tensor<f32>\n})'
    " {replica_groups = dense<> : tensor<0x0xi64>} : (tensor<f32>) -> tensor<f32>",
    "%r = stablehlo.replica_id : tensor<ui32>\n %y = stablehlo.convert %r : (tensor<ui32>) -> tensor<f32>",
])  # fmt: skip
def test_a_module_for_several_devices_is_refused(line):
    text = (
        "module @m attributes {mhlo.num_replicas = 2 : i32} {\nfunc.func @main(%x: tensor<f32>) -> tensor<f32> {\n"
        f" {line}\n return %y : tensor<f32>\n}}\n}}"
    )
    with pytest.raises(CompileError, match="2 processes"):
        aotc.compile(text.encode())


def test_shardy_annotations_do_not_change_values():
    text = """
sdy.mesh @mesh = <["x"=1]>
func.func @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<4xf32> {
  %0 = sdy.sharding_constraint %x <@mesh, [{}]> : tensor<4xf32>
  %1 = sdy.reshard %0 <@mesh, [{"x"}]> : tensor<4xf32>
  %2 = sdy.propagation_barrier %1 allowed_direction=NONE : tensor<4xf32>
  sdy.sharding_group %2 group_id=0 : tensor<4xf32>
  %3 = sdy.constant dense<2.0> : tensor<4xf32>
  %4 = sdy.manual_computation(%2) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"}
      (%p: tensor<4xf32>) {
    %5 = stablehlo.add %p, %p : tensor<4xf32>
    sdy.return %5 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %6 = stablehlo.add %4, %3 : tensor<4xf32>
  return %6 : tensor<4xf32>
}
"""
    got = aotc.load(aotc.compile(text.encode())).invoke("main", ROW)[0]
    np.testing.assert_array_equal(got, ROW + ROW + 2)


SUM = """({ ^bb0(%p: tensor<f64>, %q: tensor<f64>):
 %s = stablehlo.add %p, %q : tensor<f64>
 stablehlo.return %s : tensor<f64>
})"""


def test_combiners_may_use_a_wider_dtype():
    x = np.float32([1, 1e-9, 2, 4])
    args = {"x": ("tensor<4xf32>", x), "z": ("tensor<f32>", np.float32(0)), "i": ("tensor<1xi32>", np.int32([2]))}
    line = f'%y = "stablehlo.reduce"(%x, %z) {SUM} {{dimensions = array<i64: 0>}} : (tensor<4xf32>, tensor<f32>) -> '
    check(f"{line} tensor<f64>", "tensor<f64>", args, np.asarray(x.astype("f8").sum()))
    line = f'%y = "stablehlo.reduce_window"(%x, %z) {SUM} {{window_dimensions = array<i64: 2>}}'
    check(f"{line} : (tensor<4xf32>, tensor<f32>) -> tensor<3xf64>", "tensor<3xf64>", args,
          x[1:].astype("f8") + x[:-1])  # fmt: skip
    line = f'%y = "stablehlo.all_reduce"(%x) {SUM} {{replica_groups = dense<[[0]]> : tensor<1x1xi64>}}'
    check(f"{line} : (tensor<4xf32>) -> tensor<4xf64>", "tensor<4xf64>", args, x.astype("f8"))
    line = f"""%u = stablehlo.reshape %z : (tensor<f32>) -> tensor<1xf32>
 %y = "stablehlo.scatter"(%x, %i, %u) {SUM} {{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
 scatter_dims_to_operand_dims = [0], index_vector_dim = 0>}} : (tensor<4xf32>, tensor<1xi32>, tensor<1xf32>) ->"""
    indices = line.replace("index_vector_dim = 0", "index_vector_dim = 1")
    check(f"{indices} tensor<4xf64>", "tensor<4xf64>", args, x.astype("f8"))


BRANCH = """({ ^bb0(%p: tensor<f32>, %q: tensor<f32>):
 %c = stablehlo.compare LT, %p, %q : (tensor<f32>, tensor<f32>) -> tensor<i1>
 %s = "stablehlo.if"(%c) ({ stablehlo.return %q : tensor<f32> }, { stablehlo.return %p : tensor<f32> })
   : (tensor<i1>) -> tensor<f32>
 stablehlo.return %s : tensor<f32>
})"""


def test_branches_in_elementwise_computations_match_numpy():
    args = {"x": ("tensor<2x4xf32>", X), "w": ("tensor<2x4xf32>", X[::-1].copy()), "z": ("tensor<f32>", np.float32(0))}
    line = f'%y = "stablehlo.map"(%x, %w) {BRANCH} {{dimensions = array<i64: 0, 1>}}'
    larger = np.maximum(X, X[::-1])
    check(f"{line} : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>", "tensor<2x4xf32>", args, larger)
    line = f'%y = "stablehlo.reduce"(%x, %z) {BRANCH} {{dimensions = array<i64: 1>}} : (tensor<2x4xf32>, tensor<f32>)'
    check(f"{line} -> tensor<2xf32>", "tensor<2xf32>", args, X.max(1))


@pytest.mark.parametrize("dtype", ["i1", "i32", "ui8", "complex<f32>", "!quant.uniform<i8:f32,0.5>"])
@pytest.mark.parametrize("name", ["next_after", "polygamma", "zeta"])
def test_broadcast_ops_refuse_unsupported_dtypes(name, dtype):
    """jaxlib's decomposition ends the process at a polygamma of integers."""
    t = f"tensor<3x{dtype}>"
    line = f"%y = chlo.broadcast_{name} %x, %x : ({t}, {t}) -> {t}"
    with pytest.raises(CompileError, match=rf"<model>:2:7: error: .*'chlo.(broadcast_)?{name}' op operand #0"):
        import_model(written(line, t, {"x": (t, None)}))


@pytest.mark.parametrize("dtype", ["f8E4M3FN", "bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("name", ["acos", "acosh", "atanh", "bessel_i1e", "polygamma", "zeta"])
def test_decomposed_ops_without_rank_are_refused(name, dtype):
    """jaxlib's decomposition ends the process where it asks a tensor without rank for its shape."""
    t, two = f"tensor<*x{dtype}>", name in ("polygamma", "zeta")
    operands, types = ("%x, %x", f"{t}, {t}") if two else ("%x", t)
    line = f'%y = "chlo.{name}"({operands}) : ({types}) -> {t}'
    with pytest.raises(CompileError, match=r"<model>:2:7: error: .*rank"):
        import_model(written(line, t, {"x": (t, None)}))


@pytest.mark.parametrize("rows", ["2", "?"])
@pytest.mark.parametrize("op", ["broadcast_add", "broadcast_polygamma", "acosh", "bessel_i1e", "sinh", "erf_inv"])
def test_the_xla_oracle_runs_the_unmodified_model(op, rows):
    """As an oracle it needs nothing of what the importer rewrites, and has nothing of it."""
    t, two = f"tensor<{rows}x4xf32>", op.startswith("broadcast")
    operands, types = ("%x, %z", f"{t}, tensor<4xf32>") if two else ("%x", t)
    line = f'%y = "chlo.{op}"({operands}) : ({types}) -> {t}'
    text = written(line, t, {"x": (t, None), "z": ("tensor<4xf32>", None)})
    values = [X.round() / 4, ROW]
    np.testing.assert_allclose(run_xla(fetch(text), values)[0], interpret(import_model(text), *values)[0], rtol=2e-6)


def test_shape_of_in_chlo_decompositions_is_imported():
    t = "tensor<?x4xf32>"
    body = (
        "%s = shape.shape_of %x : tensor<f32> -> tensor<0xindex>\n"
        " %0 = stablehlo.dynamic_broadcast_in_dim %x, %s, dims = [] : (tensor<f32>, tensor<0xindex>) -> tensor<f32>\n"
        f" %r = shape.shape_of %z : {t} -> tensor<2xindex>\n"
        f" %y = stablehlo.dynamic_broadcast_in_dim %0, %r, dims = [] : (tensor<f32>, tensor<2xindex>) -> {t}"
    )
    check(body, t, {"x": ("tensor<f32>", np.float32(3)), "z": (t, X)}, np.full((2, 4), np.float32(3)))


@pytest.mark.parametrize("dtype", ["complex<f32>", "complex<f64>", "!quant.uniform<i8:f32,0.5>"])
def test_ragged_dot_of_unsupported_dtypes_is_refused(dtype):
    """jaxlib's decomposition makes a zero of the left operand's type, and ends the process."""
    line, args, results = CASES["chlo.ragged_dot"][0]
    text = module(line, args, results).replace("3x4xf32", f"3x4x{dtype}")
    with pytest.raises(CompileError, match=r"<model>:2:7: error: chlo.ragged_dot: its left operand is tensor<3x4x"):
        import_model(text)
