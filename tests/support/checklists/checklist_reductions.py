"""Rows of the checklist: windows, reductions, sorts, contractions."""

import numpy as np

from support.checklists.checklist import RNG, F, I, N, P, add, less, region


def windows():
    add(
        "stablehlo.reduce",
        f'%y = "stablehlo.reduce"(%a, %b) {region("add")} {{dimensions = array<i64: 1>}} : (@T0, @T1) -> @R0',
        (F, np.float32(0.5)),
        ["3xf32"],
    )
    both = (
        "({ ^bb0(%p: tensor<f32>, %i: tensor<i32>, %q: tensor<f32>, %j: tensor<i32>):\n"
        " %s = stablehlo.maximum %p, %q : tensor<f32>\n %t = stablehlo.add %i, %j : tensor<i32>\n"
        " stablehlo.return %s, %t : tensor<f32>, tensor<i32>\n})"
    )
    add(
        "stablehlo.reduce",
        f'%y:2 = "stablehlo.reduce"(%a, %b, %c, %d) {both} {{dimensions = array<i64: 0>}} : '
        "(@T0, @T1, @T2, @T3) -> (@R0, @R1)",
        (F, I, np.float32(-9), N(1)),
        ["4xf32", "4xi32"],
    )
    attrs = (
        "window_dimensions = array<i64: 2, 3>, window_strides = array<i64: 2, 1>, base_dilations = array<i64: 2, 1>, "
        "window_dilations = array<i64: 3, 1>, padding = dense<[[2, 1], [0, 1]]> : tensor<2x2xi64>"
    )
    add(
        "stablehlo.reduce_window",
        f'%y = "stablehlo.reduce_window"(%a, %b) {region("add")} {{{attrs}}} : (@T0, @T1) -> @R0',
        (F, np.float32(0)),
        ["3x3xf32"],
    )
    add(
        "stablehlo.select_and_scatter",
        f'%y = "stablehlo.select_and_scatter"(%a, %b, %c) {less("f32")}, {region("add")} '.replace("}), ({", "}, {")
        + "{window_dimensions = array<i64: 2, 2>, window_strides = array<i64: 1, 1>, padding = "
        "dense<0> : tensor<2x2xi64>} : (@T0, @T1, @T2) -> @R0",
        (F, P[:2, :3].copy(), np.float32(0)),
        ["3x4xf32"],
    )
    add(
        "stablehlo.map",
        f'%y = "stablehlo.map"(%a, %b) {region("multiply")} {{dimensions = array<i64: 0, 1>}} : (@T0, @T1) -> @R0',
        (F, P),
        ["3x4xf32"],
    )


def normalization():
    norm = "{epsilon = 0.001 : f32, feature_index = 1 : i64}"
    row = P[0]
    add(
        "stablehlo.batch_norm_inference",
        f'%y = "stablehlo.batch_norm_inference"(%a, %b, %c, %d, %e) {norm} : (@T0, @T1, @T2, @T3, @T4) -> @R0',
        (F, row, row, row, row),
        ["3x4xf32"],
    )
    add(
        "stablehlo.batch_norm_training",
        f'%y:3 = "stablehlo.batch_norm_training"(%a, %b, %c) {norm} : (@T0, @T1, @T2) -> (@R0, @R1, @R2)',
        (F, row, row),
        ["3x4xf32", "4xf32", "4xf32"],
    )
    add(
        "stablehlo.batch_norm_grad",
        f'%y:3 = "stablehlo.batch_norm_grad"(%a, %b, %c, %d, %e) {norm} : (@T0, @T1, @T2, @T3, @T4) -> (@R0, @R1, @R2)',
        (F, row, row, row, P),
        ["3x4xf32", "4xf32", "4xf32"],
    )
    scan = (
        "%y:2 = chlo.scan(%a) inits(%b) dimension=0 {\n ^bb0(%p: tensor<4xf32>, %q: tensor<4xf32>):\n"
        " %s = stablehlo.add %p, %q : tensor<4xf32>\n stablehlo.return %s, %s : tensor<4xf32>, tensor<4xf32>\n}"
        " : (@T0, @T1) -> (@R0, @R1)"
    )
    add("chlo.scan", scan, (F, P[0]), ["3x4xf32", "4xf32"])


def contraction():
    three = RNG.normal(size=(2, 3, 4)).astype("f4")
    add(
        "stablehlo.dot_general",
        "%y = stablehlo.dot_general %a, %b, batching_dims = [0] x [0], contracting_dims = [2] x [1]"
        " : (@T0, @T1) -> @R0",
        (three, three.transpose(0, 2, 1).copy()),
        ["2x3x3xf32"],
    )
    add("stablehlo.dot", '%y = "stablehlo.dot"(%a, %b) : (@T0, @T1) -> @R0', (F, P.T.copy()), ["3x3xf32"])
    add(
        "stablehlo.einsum",
        '%y = "stablehlo.einsum"(%a, %b) {einsum_config = "ij,kj->ki"} : (@T0, @T1) -> @R0',
        (F, P),
        ["3x3xf32"],
    )
    add(
        "stablehlo.unary_einsum",
        '%y = "stablehlo.unary_einsum"(%a) {einsum_config = "ij->ji"} : (@T0) -> @R0',
        (F,),
        ["4x3xf32"],
    )
    x, k = (RNG.integers(-4, 5, s).astype("f4") for s in [(2, 6, 5, 4), (3, 2, 2, 6)])
    window = (
        "window = {stride = [2, 1], pad = [[1, 2], [0, -1]], lhs_dilate = [1, 2], rhs_dilate = [2, 1], "
        "reverse = [true, false]} {batch_group_count = 1 : i64, feature_group_count = 2 : i64}"
    )
    add(
        "stablehlo.convolution",
        f"%y = stablehlo.convolution(%a, %b) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],"
        f" {window} : (@T0, @T1) -> @R0",
        (x, k),
        ["2x3x7x6xf32"],
    )
    add(
        "stablehlo.convolution",
        "%y = stablehlo.convolution(%a, %b) dim_numbers = [f, b, 0]x[o, i, 0]->[b, 0, f], window = "
        "{} {batch_group_count = 2 : i64, feature_group_count = 1 : i64} : (@T0, @T1) -> @R0",
        (I[:, :, None].repeat(5, 2), RNG.integers(-3, 3, (4, 3, 2)).astype("i4")),
        ["2x4x4xi32"],
    )


def solvers():
    add(
        "stablehlo.fft",
        "%y = stablehlo.fft %a, type = RFFT, length = [3, 4] : (@T0) -> @R0",
        (F,),
        ["3x3xcomplex<f32>"],
    )
    spd = (F[:, :3] @ F[:, :3].T + 9 * np.eye(3)).astype("f4")
    add("stablehlo.cholesky", "%y = stablehlo.cholesky %a, lower = true : @T0", (spd,), ["3x3xf32"])
    add(
        "stablehlo.triangular_solve",
        '%y = "stablehlo.triangular_solve"(%a, %b) {left_side = true, lower = true, '
        "unit_diagonal = false, transpose_a = #stablehlo<transpose TRANSPOSE>} : (@T0, @T1) -> @R0",
        (spd, F),
        ["3x4xf32"],
    )
    add(
        "chlo.ragged_dot",
        '%y = "chlo.ragged_dot"(%a, %b, %c) {ragged_dot_dimension_numbers = #chlo.ragged_dot<'
        "lhs_batching_dimensions = [], rhs_batching_dimensions = [], lhs_contracting_dimensions = [1], "
        "rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0], rhs_group_dimensions = "
        "[0]>, precision_config = "
        "[#chlo<precision DEFAULT>, #chlo<precision DEFAULT>]} : (@T0, @T1, @T2) -> @R0",
        (F, RNG.normal(size=(2, 4, 5)).astype("f4"), np.int64([1, 2])),
        ["3x5xf32"],
    )
