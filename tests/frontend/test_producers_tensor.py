"""MLIR's ``tensor`` ops next to StableHLO, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.ir

RNG = np.random.default_rng(2)
X = RNG.standard_normal((6, 4)).astype(np.float32)


def load(lines, result, results="%0", arguments="%x: tensor<?x4xf32>, %n: index"):
    head = "%c0 = arith.constant 0 : index\n%c1 = arith.constant 1 : index\n%c2 = arith.constant 2 : index\n"
    text = f"func.func @main({arguments}) -> ({result}) {{\n{head}{lines}\nreturn {results} : {result}\n}}"
    return aotc.load(aotc.compile(text, opt_level=1))


def check(module, function, *arrays):
    got, want = module(*arrays), function(*arrays)
    got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
        assert np.asarray(g).dtype == np.asarray(w).dtype


def test_tensor_extract_and_insert_match_numpy():
    module = load(
        "%a = tensor.extract %x[%n, %c1] : tensor<?x4xf32>\n%0 = tensor.insert %a into %x[%c0, %c2] : tensor<?x4xf32>",
        "f32, tensor<?x4xf32>", "%a, %0",
    )  # fmt: skip

    def moved(x, n):
        y = x.copy()
        y[0, 2] = x[n, 1]
        return x[n, 1], y

    for n in (0, 3, 5):
        check(module, moved, X, np.int64(n))


def test_tensor_generate_matches_numpy():
    module = load(
        """%0 = tensor.generate %n {
          ^bb0(%i: index, %j: index):
            %k = arith.muli %i, %c2 : index
            %a = tensor.extract %x[%i, %j] : tensor<?x4xf32>
            %r = arith.remui %k, %n : index
            %b = tensor.extract %x[%r, %c1] : tensor<?x4xf32>
            %f = arith.index_cast %j : index to i32
            %g = arith.sitofp %f : i32 to f32
            %s = arith.addf %a, %b : f32
            %t = arith.addf %s, %g : f32
            tensor.yield %t : f32
        } : tensor<?x3xf32>""",
        "tensor<?x3xf32>",
    )

    def generated(x, n):
        i, j = np.indices((n, 3))
        return x[i, j] + x[2 * i % n, 1] + j.astype(np.float32)

    for n in (1, 5, 6):
        check(module, generated, X, np.int64(n))


def test_a_generated_shape_stays_symbolic():
    module = load(
        """%s = tensor.generate {
          ^bb0(%i: index):
            %d = tensor.dim %x, %c0 : tensor<?x4xf32>
            %p = arith.cmpi eq, %i, %c0 : index
            %r = arith.select %p, %d, %c2 : index
            tensor.yield %r : index
        } : tensor<2xindex>
        %one = stablehlo.constant dense<1.0> : tensor<f32>
        %0 = stablehlo.dynamic_broadcast_in_dim %one, %s, dims = []
            : (tensor<f32>, tensor<2xindex>) -> tensor<?x?xf32>""",
        "tensor<?x?xf32>",
    )
    check(module, lambda x, n: np.ones((len(x), 2), np.float32), X, np.int64(0))
    assert "f32[d0, 2]" in repr(module)


def test_tensor_splat_empty_and_rank_match_numpy():
    module = load(
        """%e = tensor.empty(%n) : tensor<?x2xf32>
        %f = arith.constant 1.5 : f32
        %s = tensor.splat %f[%n] : tensor<2x?xf32>
        %r = tensor.rank %x : tensor<?x4xf32>
        %b = tensor.bitcast %x : tensor<?x4xf32> to tensor<?x4xi32>
        %a = stablehlo.multiply %e, %e : tensor<?x2xf32>""",
        "tensor<?x2xf32>, tensor<2x?xf32>, index, tensor<?x4xi32>", "%a, %s, %r, %b",
    )  # fmt: skip
    zeros, splat = (lambda n: np.zeros((n, 2), np.float32)), lambda n: np.full((2, n), 1.5, np.float32)
    for n in (0, 3):
        check(module, lambda x, n: (zeros(n), splat(n), np.int64(2), x.view(np.int32)), X, np.int64(n))


def test_tensor_reshapes_match_numpy_and_check_sizes():
    module = load(
        """%a = tensor.collapse_shape %x [[0, 1]] : tensor<?x4xf32> into tensor<?xf32>
        %d = tensor.dim %x, %c0 : tensor<?x4xf32>
        %h = arith.divsi %d, %c2 : index
        %b = tensor.expand_shape %x [[0, 1], [2, 3]] output_shape [%h, 2, 4, 1]
            : tensor<?x4xf32> into tensor<?x2x4x1xf32>
        %s = tensor.from_elements %c2, %c2, %d : tensor<3xindex>
        %c = tensor.reshape %x(%s) : (tensor<?x4xf32>, tensor<3xindex>) -> tensor<2x2x?xf32>""",
        "tensor<?xf32>, tensor<?x2x4x1xf32>, tensor<2x2x?xf32>", "%a, %b, %c",
    )  # fmt: skip
    expected = lambda x, n: (x.reshape(-1), x.reshape(-1, 2, 4, 1), x.reshape(2, 2, -1))
    for rows in (2, 6):
        check(module, expected, X[:rows], np.int64(0))
    with pytest.raises(aotc.CallError, match="expand_shape of size"):
        module(X[:3], np.int64(0))


def test_tensor_slices_match_numpy():
    module = load(
        """%a = tensor.extract_slice %x[0, 1] [2, 2] [2, 1] : tensor<?x4xf32> to tensor<2x2xf32>
        %b = tensor.extract_slice %x[%n, 1] [2, 1] [1, 1] : tensor<?x4xf32> to tensor<2xf32>
        %m = arith.addi %n, %c1 : index
        %c = tensor.extract_slice %x[1, 0] [%m, 4] [1, 1] : tensor<?x4xf32> to tensor<?x4xf32>
        %d = tensor.extract_slice %x[%n, 3] [1, 1] [1, 1] : tensor<?x4xf32> to tensor<1xf32>
        %e = tensor.extract_slice %x[%n, 0] [2, 2] [2, 3] : tensor<?x4xf32> to tensor<2x2xf32>
        %f = tensor.insert_slice %b into %x[%n, 2] [2, 1] [1, 1] : tensor<2xf32> into tensor<?x4xf32>
        %g = tensor.insert_slice %a into %x[1, 1] [2, 2] [1, 1] : tensor<2x2xf32> into tensor<?x4xf32>""",
        "tensor<2x2xf32>, tensor<2xf32>, tensor<?x4xf32>, tensor<1xf32>, tensor<2x2xf32>, tensor<?x4xf32>, "
        "tensor<?x4xf32>", "%a, %b, %c, %d, %e, %f, %g",
    )  # fmt: skip

    def sliced(x, n):
        f, g = x.copy(), x.copy()
        f[n : n + 2, 2] = x[n : n + 2, 1]
        g[1:3, 1:3] = x[0:3:2, 1:3]
        return x[0:3:2, 1:3], x[n : n + 2, 1], x[1 : n + 2], x[n, 3:4], x[n : n + 3 : 2, ::3], f, g

    for n in (0, 3):
        check(module, sliced, X, np.int64(n))


def test_tensor_pad_concat_and_gather_match_numpy():
    module = load(
        """%f = arith.constant 7.0 : f32
        %a = tensor.pad %x low[1, %n] high[0, 2] {
          ^bb0(%i: index, %j: index):
            tensor.yield %f : f32
        } : tensor<?x4xf32> to tensor<?x?xf32>
        %b = tensor.concat dim(0) %x, %x : (tensor<?x4xf32>, tensor<?x4xf32>) -> tensor<?x4xf32>
        %k = arith.constant dense<[[2], [0], [1]]> : tensor<3x1xindex>
        %c = tensor.gather %x[%k] gather_dims([0]) : (tensor<?x4xf32>, tensor<3x1xindex>) -> tensor<3x1x4xf32>
        %d = tensor.gather %x[%k] gather_dims([0]) : (tensor<?x4xf32>, tensor<3x1xindex>) -> tensor<3x4xf32>""",
        "tensor<?x?xf32>, tensor<?x4xf32>, tensor<3x1x4xf32>, tensor<3x4xf32>", "%a, %b, %c, %d",
    )  # fmt: skip

    def expected(x, n):
        rows = x[[2, 0, 1]]
        padded = np.pad(x, ((1, 0), (n, 2)), constant_values=np.float32(7))
        return padded, np.concatenate([x, x]), rows[:, None], rows

    for n in (0, 3):
        check(module, expected, X[:5], np.int64(n))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%l = tensor.concat dim(0) %x, %x : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<4x2xf32>\n"
         "%i = tensor.insert_slice %x into %l[0, 0] [2, 2] [2, 1] : tensor<2x2xf32> into tensor<4x2xf32>\n"
         "%0 = tensor.extract_slice %i[0, 0] [2, 2] [1, 1] : tensor<4x2xf32> to tensor<2x2xf32>",
         r"insert_slice with strides \[2, 1\]"),
        ("%0 = tensor.pad %x low[0, 0] high[0, 0] {\n^bb0(%i: index, %j: index):\n"
         "%v = tensor.extract %x[%i, %j] : tensor<2x2xf32>\ntensor.yield %v : f32\n} "
         ": tensor<2x2xf32> to tensor<2x2xf32>", "depends on the index"),
        ("%k = arith.constant dense<0> : tensor<1x2xindex>\n%s = tensor.from_elements %f : tensor<1xf32>\n"
         "%0 = tensor.scatter %s into %x[%k] scatter_dims([0, 1]) unique "
         ": (tensor<1xf32>, tensor<2x2xf32>, tensor<1x2xindex>) -> tensor<2x2xf32>", "tensor.scatter on"),
    ],
)  # fmt: skip
def test_unsupported_tensor_ops_are_refused(line, message):
    text = "func.func @main(%x: tensor<2x2xf32>) -> tensor<2x2xf32> {\n%f = arith.constant 1.0 : f32\n"
    with pytest.raises(CompileError, match=message) as error:
        aotc.compile(f"{text}{line}\nreturn %0 : tensor<2x2xf32>\n}}")
    assert "try:" in str(error.value)
