"""Programs with unknown sizes beyond the checklist, called with sizes that fit and that do not.

They are exports of JAX, which itself checks the sizes; and the same exports without JAX's assertions, and text, where
the requirements of aotc's ops must suffice, and the reference interpreter is the oracle. A test starts this program
under ``AOTC_GUARD=1``.
"""

import re
import sys
import zlib

import jax
import numpy as np
from jax import export, lax
from jax.lax import linalg

import aotc
from aotc.vmfb.errors import CallError
from support.dynamic_ops import agree, check_call, resized, shapes_of

KEY = np.array([1, 2, 3, 4], np.uint32)

# a function, its arguments' sizes, what JAX is told of these
EXPORTS = {
    "cholesky": (linalg.cholesky, ["b, n, n"], ()),
    "getrf": (linalg.lu, ["b, m, n"], ()),
    "geqrf": (lambda x: linalg.qr(x, full_matrices=False), ["b, m, n"], ("m >= n",)),
    "geqp3": (lambda x: linalg.qr(x, pivoting=True, full_matrices=False), ["b, m, n"], ("m >= n",)),
    "gesdd": (lambda x: linalg.svd(x, full_matrices=False, compute_uv=False), ["b, m, n"], ()),
    "syevd": (lambda x: linalg.eigh(x, symmetrize_input=True)[1], ["b, n, n"], ()),
    "geev": (lambda x: linalg.eig(x)[0], ["b, n, n"], ()),
    "gees": (lambda x: linalg.schur(x)[0], ["b, n, n"], ()),
    "sytrd": (linalg.tridiagonal, ["b, n, n"], ()),
    "orgqr": (linalg.householder_product, ["b, m, n", "b, k"], ("m >= n", "n >= k")),
    "ormqr": (linalg.ormqr, ["m, n", "k", "m, p"], ("m >= n", "n >= k")),
    "gtsv": (linalg.tridiagonal_solve, ["b, n", "b, n", "b, n", "b, n, k"], ()),
    "triangular_solve": (lambda a, b: linalg.triangular_solve(a, b, left_side=True), ["n, n", "n, k"], ()),
    "fft": (lambda x: jax.numpy.abs(jax.numpy.fft.fft(x)), ["b, n, 8"], ()),
    "rng_bit_generator": (lambda x: lax.rng_bit_generator(KEY, (2 * x.shape[0], 3))[1], ["n"], ()),
}
NOT_COMPARED = {"geev", "gees"}  # the order of what they find is LAPACK's own

CSR = """
func.func @main(%d: tensor<?xf32>, %c: tensor<?xi32>, %s: tensor<?xi32>, %x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %y = stablehlo.custom_call @cpu_csr_sparse_dense_ffi(%d, %s, %c, %x)
    : (tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}"""
TRIDIAGONAL = """
func.func @main(%l: tensor<?x?xf32>, %d: tensor<?x?xf32>, %u: tensor<?x?xf32>, %b: tensor<?x?x?xf32>)
    -> tensor<?x?x?xf32> {
  %y = stablehlo.custom_call @tridiagonal_solve_perturbed_ffi(%l, %d, %u, %b)
    : (tensor<?x?xf32>, tensor<?x?xf32>, tensor<?x?xf32>, tensor<?x?x?xf32>) -> tensor<?x?x?xf32>
  return %y : tensor<?x?x?xf32>
}"""
RAGGED = """
func.func @main(%x: tensor<?x?xf32>, %o: tensor<?x?xf32>, %s: tensor<1xi32>, %n: tensor<1xi32>, %t: tensor<1xi32>)
    -> tensor<?x?xf32> {
  %y = stablehlo.custom_call @ragged_all_to_all(%x, %o, %s, %n, %t, %n)
    {backend_config = {replica_groups = dense<0> : tensor<1x1xi64>}, api_version = 4 : i32}
    : (tensor<?x?xf32>, tensor<?x?xf32>, tensor<1xi32>, tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}"""
# The sum of ones is a size that is read from memory; it must be that of y, and below 6.
COMPUTED = """
func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %s = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
    : (tensor<?xf32>, tensor<f32>) -> tensor<f32>
  %six = stablehlo.constant dense<6.0> : tensor<f32>
  %few = stablehlo.compare LT, %s, %six : (tensor<f32>, tensor<f32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%few) {error_message = "six or more", has_side_effect = true}
    : (tensor<i1>) -> ()
  %i = stablehlo.convert %s : (tensor<f32>) -> tensor<i32>
  %n = stablehlo.reshape %i : (tensor<i32>) -> tensor<1xi32>
  %k = stablehlo.dynamic_iota %n, dim = 0 : (tensor<1xi32>) -> tensor<?xf32>
  %z = stablehlo.add %k, %y : tensor<?xf32>
  return %z : tensor<?xf32>
}"""
ONES, PLACES = np.ones(3, np.float32), np.array([0, 1], np.int32)
TEXTS = {
    "csr_dot": (CSR, [ONES, np.zeros(3, "i"), np.array([0, 1, 3], "i"), np.ones((2, 4), "f")]),
    "tridiagonal_solve_perturbed": (TRIDIAGONAL, [*3 * [np.ones((4, 3), "f")], np.ones((4, 3, 2), "f")]),
    "ragged_all_to_all": (RAGGED, [np.ones((3, 2), "f"), np.zeros((4, 2), "f"), PLACES[:1], PLACES[1:], PLACES[:1]]),
    "computed sizes": (COMPUTED, [ONES, ONES]),
}
SPECS = {name: specs for name, (_, specs, _) in EXPORTS.items()} | {
    "csr_dot": ["k", "k", "m", "n, p"],
    "tridiagonal_solve_perturbed": ["b, n", "b, n", "b, n", "b, n, k"],
    "ragged_all_to_all": ["m, k", "n, k", "1", "1", "1"],
    "computed sizes": ["n", "m"],
}
UNSAFE = [export.DisabledSafetyCheck.custom_call(f"lapack_s{name}_ffi") for name in ("ormqr", "geqp3")]


def exported(name):
    """Return an export, and its text without assertions."""
    function, specs, constraints = EXPORTS[name]
    scope = export.SymbolicScope(constraints)
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), np.float32) for s in specs]
    made = export.export(jax.jit(function), disabled_checks=UNSAFE)(*types)
    return made, "\n".join(line for line in made.mlir_module().splitlines() if "@shape_assertion" not in line)


def text_of(name):
    """Return the text of a program without JAX's assertions."""
    return TEXTS[name][0] if name in TEXTS else exported(name)[1]


def dims(specs, known):
    """Return the shapes of the arguments for ``known`` sizes."""
    return [[known[s.strip()] if s.strip() in known else int(s) for s in spec.split(",")] for spec in specs]


def empty(name):
    """Yield arguments for every choice of sizes that are 0; others have the size that JAX assumes."""
    specs = SPECS[name]
    names = sorted(set("bkmnp") & set("".join(specs)))
    for choice in range(1, 2 ** len(names)):
        known = {n: 0 if choice >> k & 1 else "bknmp".index(n) + 9 for k, n in enumerate(names)}
        yield [resized(a, s) for a, s in zip(given(name, specs), dims(specs, known))]


def given(name, specs):
    """Return arrays of the elements of the arguments, of any sizes."""
    return TEXTS[name][1] if name in TEXTS else [np.ones(1, "f")] * len(specs)


def sizes_of(specs, rng):
    """Return sizes that mostly fit; every other time one dim is changed."""
    known = dict(zip("bkmnp", sorted(int(n) for n in rng.integers(1, 7, 5))))  # k <= m: JAX is told so
    known["k"], known["n"], known["m"] = sorted((known["k"], known["n"], known["m"]))
    shapes = dims(specs, known)
    if rng.integers(2):
        shape = shapes[rng.integers(len(shapes))]
        d = rng.integers(len(shape))
        shape[d] = max(0, shape[d] + int(rng.choice([-1, 1, -9, 5])))
    return shapes


def by_jax(made, module, args, compared):
    """Call an export; return ``fits`` or ``refused`` if that agrees with JAX, else a description of the failure."""
    try:
        wanted = jax.tree.leaves(made.call(*args))
    except ValueError:
        wanted = None
    try:
        found = module.invoke("main", *args)
    except CallError as error:
        return "refused" if wanted is None else f"JAX computes it, but: {error}"
    if wanted is None:
        return "JAX refuses it, but we do not"
    try:
        agree(found, wanted if compared else [np.asarray(x) for x in found])
    except AssertionError as error:
        return f"differs: {error}"
    return "fits"


def without_jax(module, text, args):
    """Call a program without assertions; return ``fits`` or ``refused``, or a description of the failure."""
    try:
        return check_call(module, text, args, False)
    except IndexError:  # the reference's own: what is in the arrays leads it beyond them, and ours must not go there
        module.invoke("main", *args)
        return "fits"


def arguments(name, rng, count):
    """Yield the arguments of each call."""
    if name in EXPORTS:
        for _ in range(count):
            yield [rng.normal(size=s).astype("f") for s in sizes_of(EXPORTS[name][1], rng)]
        return
    text, rows = TEXTS[name]
    dynamic = [n for n, t in enumerate(re.findall(r"%\w+: tensor<([^>]*)>", text)[: len(rows)]) if "?" in t]
    for shapes in shapes_of(rows, dynamic, rng, count):
        yield [resized(a, s) for a, s in zip(rows, shapes)]


def check(name, count):
    """Yield the failures of a program; print a line before each call."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    made, text = exported(name) if name in EXPORTS else (None, TEXTS[name][0])
    plain = aotc.load(aotc.compile(text.encode()), threads=1)
    asserting = made and aotc.load(aotc.compile(made), threads=1)
    calls = [(args, ["plain"]) for args in empty(name)]
    calls += [(args, ["jax", "plain"] if made else ["plain"]) for args in arguments(name, rng, count)]
    for args, ways in calls:
        for way in ways:
            print("CALL", name, way, [a.shape for a in args], flush=True)
            if way == "jax":
                outcome = by_jax(made, asserting, args, name not in NOT_COMPARED)
            else:
                outcome = without_jax(plain, text, args)
            print("DONE", outcome.splitlines()[0], flush=True)
            if outcome not in ("fits", "refused"):
                yield f"{name}, {way}, sizes {[a.shape for a in args]}: {outcome}"


def main(count, names):
    wrong = [fault for name in names for fault in check(name, count)]
    print("WRONG", len(wrong), flush=True)
    print("\n\n".join(wrong), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
