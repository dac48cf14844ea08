"""Rows of the checklist: elementwise ops, and ops that move elements."""

import numpy as np

from support.checklists.checklist import MLIR, B, C, F, I, N, P, S, add, less, region


def rows(dialect, names, values, types=None):
    """Add each op of ``names`` on each of ``values``, operands of 3 x 4; results of ``types``, or like the first."""
    for name in names.split():
        for v in values:
            given = v if isinstance(v, tuple) else (v,)
            operands = ", ".join(f"%{n}" for n, _ in zip("abc", given))
            signature = ", ".join(f"@T{n}" for n in range(len(given)))
            out = f"3x4x{types or MLIR[given[0].dtype.name]}"
            line = f'%y = "{dialect}.{name}"({operands}) : ({signature}) -> @R0'
            add(f"{dialect}.{name}", line, given, [out])


def elementwise():
    rows("stablehlo", "cosine exponential exponential_minus_one logistic sine tan tanh", [F, C])
    rows("stablehlo", "log log_plus_one rsqrt sqrt cbrt", [P])
    rows("stablehlo", "log rsqrt sqrt", [C])
    rows("stablehlo", "ceil floor round_nearest_afz round_nearest_even", [F])
    rows("stablehlo", "abs", [F, I])
    rows("stablehlo", "negate sign", [F, I, C])
    rows("stablehlo", "not popcnt count_leading_zeros", [I])
    rows("stablehlo", "is_finite", [F], "i1")
    rows("stablehlo", "real imag", [C], "f32")
    rows("stablehlo", "add subtract multiply divide", [(F, P), (C, C[::-1].copy())])
    rows("stablehlo", "add subtract multiply divide remainder maximum minimum power", [(I, S + 1)])
    rows("stablehlo", "maximum minimum remainder atan2", [(F, P)])
    rows("stablehlo", "power", [(P, F)])
    rows("stablehlo", "and or xor", [(I, S), (B, ~B)])
    rows("stablehlo", "shift_left shift_right_arithmetic shift_right_logical", [(I, S)])
    rows("stablehlo", "complex", [(F, P)], "complex<f32>")
    rows("stablehlo", "clamp", [(P - 1, F, P)])
    add("stablehlo.select", '%y = "stablehlo.select"(%a, %b, %c) : (@T0, @T1, @T2) -> @R0', (B, F, P), ["3x4xf32"])
    rows("stablehlo", "optimization_barrier", [F])
    rows("chlo", "acos asin atan atanh cosh sinh erf erf_inv erfc bessel_i1e digamma lgamma square tan asinh", [P])
    rows("chlo", "acosh", [P + 1])
    rows("chlo", "_asin_acos_kernel", [C])
    rows("chlo", "conj", [C])
    rows(
        "chlo", "is_inf is_neg_inf is_pos_inf", [np.where(B, F, np.copysign(np.float32(np.inf), I).astype("f4"))], "i1"
    )
    rows("chlo", "next_after", [(F, P)])
    rows("chlo", "zeta", [(P + 2, P)])
    rows("chlo", "polygamma", [(np.floor(P + 1.5).astype("f4"), P)])
    rows("chlo", "mulhi", [(I * 10**8, S * 10**7)])


def broadcasting():
    for name in [
        "add",
        "atan2",
        "divide",
        "maximum",
        "minimum",
        "multiply",
        "next_after",
        "power",
        "remainder",
        "subtract",
    ]:
        add(
            f"chlo.broadcast_{name}",
            f'%y = "chlo.broadcast_{name}"(%a, %b) : (@T0, @T1) -> @R0',
            (P, P[1]),
            ["3x4xf32"],
        )
    for name in ["and", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical"]:
        add(
            f"chlo.broadcast_{name}",
            f'%y = "chlo.broadcast_{name}"(%a, %b) : (@T0, @T1) -> @R0',
            (I, S[1]),
            ["3x4xi32"],
        )
    line = '%y = "chlo.broadcast_{}"(%a, %b) : (@T0, @T1) -> @R0'
    add("chlo.broadcast_zeta", line.format("zeta"), (P + 2, P[1]), ["3x4xf32"])
    add("chlo.broadcast_polygamma", line.format("polygamma"), (np.floor(P + 1.5).astype("f4"), P[1]), ["3x4xf32"])
    add("chlo.broadcast_complex", line.format("complex"), (F, P[1]), ["3x4xcomplex<f32>"])
    add(
        "chlo.broadcast_select",
        '%y = "chlo.broadcast_select"(%a, %b, %c) : (@T0, @T1, @T2) -> @R0',
        (np.array(True), F, P),
        ["3x4xf32"],
    )
    add(
        "chlo.broadcast_compare",
        '%y = "chlo.broadcast_compare"(%a, %b) {comparison_direction = '
        "#chlo<comparison_direction GE>} : (@T0, @T1) -> @R0",
        (F, P[1]),
        ["3x4xi1"],
    )


def comparisons_and_conversions():
    for direction in ["EQ", "NE", "LT", "LE", "GT", "GE"]:
        for kind, value in [
            ("FLOAT", F),
            ("TOTALORDER", F),
            ("SIGNED", I),
            ("UNSIGNED", I.astype("u4")),
            ("UNSIGNED", B),
        ]:
            other = np.roll(value, 1)
            add(
                "stablehlo.compare",
                f"%y = stablehlo.compare {direction}, %a, %b, {kind} : (@T0, @T1) -> @R0",
                (value, other),
                ["3x4xi1"],
            )
    for value, to in [(F, "i32"), (I, "f32"), (I, "i1"), (B, "f32"), (F, "f64"), (F, "complex<f32>")]:
        add("stablehlo.convert", "%y = stablehlo.convert %a : (@T0) -> @R0", (value,), [f"3x4x{to}"])
    add("stablehlo.bitcast_convert", "%y = stablehlo.bitcast_convert %a : (@T0) -> @R0", (F,), ["3x4xi32"])
    add("stablehlo.bitcast_convert", "%y = stablehlo.bitcast_convert %a : (@T0) -> @R0", (F,), ["3x4x4xi8"])
    add("stablehlo.reduce_precision", "%y = stablehlo.reduce_precision %a, format = e4m3 : @T0", (F,), ["3x4xf32"])
    add(
        "stablehlo.constant",
        "%k = stablehlo.constant dense<[1.5, -0.0]> : @T0\n%y = stablehlo.add %k, %a : @T0",
        (np.float32([0, 0]),),
        ["2xf32"],
    )
    add("chlo.constant", "%y = chlo.constant dense<2.5> : @R0", (), ["3xf32"])
    add("chlo.constant_like", '%y = "chlo.constant_like"(%a) {value = 3.0 : f32} : (@T0) -> @R0', (F,), ["3x4xf32"])


def movement():
    add(
        "stablehlo.broadcast_in_dim",
        "%y = stablehlo.broadcast_in_dim %a, dims = [2, 0] : (@T0) -> @R0",
        (F[:, :1],),
        ["5x2x3xf32"],
    )
    add(
        "stablehlo.broadcast",
        '%y = "stablehlo.broadcast"(%a) {broadcast_sizes = array<i64: 2, 1>} : (@T0) -> @R0',
        (F,),
        ["2x1x3x4xf32"],
    )
    add(
        "stablehlo.concatenate",
        "%y = stablehlo.concatenate %a, %b, dim = 1 : (@T0, @T1) -> @R0",
        (F, P[:, :2]),
        ["3x6xf32"],
    )
    for start in ([1, 1], [7, -5]):
        where = np.array(start, "i4")
        add(
            "stablehlo.dynamic_slice",
            "%y = stablehlo.dynamic_slice %a, %b, %c, sizes = [2, 3] : (@T0, @T1, @T2) -> @R0",
            (F, where[0], where[1]),
            ["2x3xf32"],
        )
        add(
            "stablehlo.dynamic_update_slice",
            "%y = stablehlo.dynamic_update_slice %a, %b, %c, %d : (@T0, @T1, @T2, @T3) -> @R0",
            (F, P[:2, :3], where[0], where[1]),
            ["3x4xf32"],
        )
    add("stablehlo.iota", "%y = stablehlo.iota dim = 1 : @R0", (), ["2x5xi32"])
    add(
        "stablehlo.pad",
        "%y = stablehlo.pad %a, %b, low = [-1, 2], high = [3, -2], interior = [2, 1] : (@T0, @T1) -> @R0",
        (F, np.float32(9)),
        ["9x7xf32"],
    )
    add("stablehlo.reshape", "%y = stablehlo.reshape %a : (@T0) -> @R0", (F,), ["2x6xf32"])
    add("stablehlo.reverse", "%y = stablehlo.reverse %a, dims = [1] : @T0", (F,), ["3x4xf32"])
    add("stablehlo.slice", "%y = stablehlo.slice %a [1:3, 0:4:3] : (@T0) -> @R0", (F,), ["2x2xf32"])
    add("stablehlo.transpose", "%y = stablehlo.transpose %a, dims = [1, 0] : (@T0) -> @R0", (F,), ["4x3xf32"])


def indexing():
    add(
        "stablehlo.gather",
        '%y = "stablehlo.gather"(%a, %b) {dimension_numbers = #stablehlo.gather<offset_dims = [1], '
        "collapsed_slice_dims = [0], start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 1, 2>} "
        ": (@T0, @T1) -> @R0",
        (F, N([[0, 1], [2, 9], [-4, 0]])),
        ["3x2xf32"],
    )
    add(
        "stablehlo.gather",
        '%y = "stablehlo.gather"(%a, %b) {dimension_numbers = #stablehlo.gather<operand_batching_dims '
        "= [0], start_indices_batching_dims = [0], collapsed_slice_dims = [1], start_index_map = "
        "[1], index_vector_dim = 2>,"
        " slice_sizes = array<i64: 1, 1>} : (@T0, @T1) -> @R0",
        (F, N([[[3]], [[0]], [[8]]])),
        ["3x1xf32"],
    )
    for op in ("add", "subtract", "maximum"):
        add(
            "stablehlo.scatter",
            f'%y = "stablehlo.scatter"(%a, %b, %c) {region(op)} {{scatter_dimension_numbers = '
            "#stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], "
            "scatter_dims_to_operand_dims = [0, 1],"
            " index_vector_dim = 1>} : (@T0, @T1, @T2) -> @R0",
            (F, N([[0, 1], [0, 2], [2, 3]]), P[:, :2].copy()),
            ["3x4xf32"],
        )
    add(
        "stablehlo.torch_index_select",
        '%y = "stablehlo.torch_index_select"(%a, %b) {dim = 1 : i64, batch_dims = 0 : i64} : (@T0, @T1) -> @R0',
        (F, N([3, 0])),
        ["3x2xf32"],
    )
    add(
        "stablehlo.sort",
        f'%y = "stablehlo.sort"(%a) {less("f32")} {{dimension = 0 : i64, is_stable = true}} : (@T0) -> @R0',
        (F,),
        ["3x4xf32"],
    )
    add("chlo.top_k", "%y:2 = chlo.top_k(%a, k = 2) : @T0 -> (@R0, @R1)", (F,), ["3x2xf32", "3x2xi32"])
