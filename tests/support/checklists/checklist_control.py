"""Rows of the checklist: dynamic sizes, control flow, and collectives."""

import numpy as np
from jaxlib.mlir.dialects import _stablehlo_ops_gen

from support.checklists.checklist import CASES, GROUPS, RNG, F, I, N, P, add, region


def shape(*n):
    """Return the line that defines a constant vector of sizes."""
    return f"%k = stablehlo.constant dense<{list(n)}> : tensor<{len(n)}xi64>\n"


def sizes():
    """Add the dynamic ops with constant sizes."""
    add(
        "stablehlo.dynamic_broadcast_in_dim",
        shape(3, 2, 4) + "%y = stablehlo.dynamic_broadcast_in_dim %a, %k, dims = [0, 2] : (@T0, tensor<3xi64>) -> @R0",
        (F,),
        ["3x2x4xf32"],
    )
    add(
        "stablehlo.dynamic_iota",
        shape(3, 2) + "%y = stablehlo.dynamic_iota %k, dim = 0 : (tensor<2xi64>) -> @R0",
        (),
        ["3x2xf32"],
    )
    add(
        "stablehlo.dynamic_reshape",
        shape(4, 3) + "%y = stablehlo.dynamic_reshape %a, %k : (@T0, tensor<2xi64>) -> @R0",
        (F,),
        ["4x3xf32"],
    )
    add(
        "stablehlo.dynamic_pad",
        shape(1, 2) + "%y = stablehlo.dynamic_pad %a, %b, %k, %k, %k : (@T0, @T1, tensor<2xi64>, "
        "tensor<2xi64>, tensor<2xi64>) -> @R0",
        (F, np.float32(7)),
        ["7x14xf32"],
    )
    add(
        "stablehlo.dynamic_gather",
        shape(1, 2) + '%y = "stablehlo.dynamic_gather"(%a, %b, %k) {dimension_numbers = '
        "#stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], "
        "index_vector_dim = 1>} : "
        "(@T0, @T1, tensor<2xi64>) -> @R0",
        (F, N([[2], [0]])),
        ["2x2xf32"],
    )
    add(
        "stablehlo.dynamic_conv",
        "%k = stablehlo.constant dense<[[1, 1]]> : tensor<1x2xi64>\n%y = "
        '"stablehlo.dynamic_conv"(%a, %b, %k) {dimension_numbers = #stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>, '
        "feature_group_count = 1 : i64, batch_group_count = 1 : i64} : (@T0, @T1, tensor<1x2xi64>) -> @R0",
        (I[None], RNG.integers(-3, 3, (2, 4, 2)).astype("i4")),
        ["1x4x2xi32"],
    )


def sizes_of_dims():
    add("stablehlo.get_dimension_size", "%y = stablehlo.get_dimension_size %a, dim = 1 : (@T0) -> @R0", (F,), ["i32"])
    add(
        "stablehlo.set_dimension_size",
        "%k = stablehlo.constant dense<4> : tensor<i32>\n%y = stablehlo.set_dimension_size %a,"
        " %k, dim = 1 : (@T0, tensor<i32>) -> @R0",
        (F,),
        ["3x4xf32"],
    )
    add(
        "stablehlo.real_dynamic_slice",
        shape(1, 0) + "%l = stablehlo.constant dense<[3, 4]> : tensor<2xi64>\n"
        "%s = stablehlo.constant dense<[1, 2]> : tensor<2xi64>\n%y = stablehlo.real_dynamic_slice "
        "%a, %k, %l, %s : (@T0, "
        "tensor<2xi64>, tensor<2xi64>, tensor<2xi64>) -> @R0",
        (F,),
        ["2x2xf32"],
    )


def control():
    branch = "{{\n stablehlo.return %{} : @T0\n}}"
    a, b = branch.format("a"), branch.format("b")
    for index in (0, 1, -1, 5):
        add("stablehlo.case", f'%y = "stablehlo.case"(%c) ({a}, {b}) : (@T2) -> @R0', (F, P, N(index)), ["3x4xf32"])
    for test in (True, False):
        add("stablehlo.if", f'%y = "stablehlo.if"(%c) ({a}, {b}) : (@T2) -> @R0', (F, P, np.array(test)), ["3x4xf32"])
    add(
        "stablehlo.while",
        "%k = stablehlo.constant dense<3> : tensor<i32>\n%y:2 = stablehlo.while(%i = %b, %x = %a) : @T1, @T0\n"
        " cond {\n %t = stablehlo.compare LT, %i, %k : (@T1, @T1) -> tensor<i1>\n stablehlo.return "
        "%t : tensor<i1>\n} do {\n"
        " %x2 = stablehlo.add %x, %x : @T0\n %o = stablehlo.constant dense<1> : tensor<i32>\n"
        " %i2 = stablehlo.add %i, %o : @T1\n stablehlo.return %i2, %x2 : @T1, @T0\n}",
        (F, N(0)),
        ["i32", "3x4xf32"],
    )
    add(
        "stablehlo.tuple",
        "%t = stablehlo.tuple %a, %b : tuple<@T0, @T1>\n"
        "%y = stablehlo.get_tuple_element %t[1] : (tuple<@T0, @T1>) -> @T1",
        (F, P),
        ["3x4xf32"],
    )
    CASES["stablehlo.get_tuple_element"] = CASES["stablehlo.tuple"]
    add(
        "stablehlo.after_all",
        "%t = stablehlo.create_token : !stablehlo.token\n%u = stablehlo.after_all %t, %t : "
        "!stablehlo.token\n%y = stablehlo.add %a, %a : @T0",
        (F,),
        ["3x4xf32"],
    )
    CASES["stablehlo.create_token"] = CASES["stablehlo.after_all"]
    add(
        "stablehlo.composite",
        '%y = stablehlo.composite "my.twice" %a {decomposition = @twice} : (@T0) -> @R0\n return %y : '
        "@R0\n}\nfunc.func private @twice(%x: @T0) -> @R0 {\n%y = stablehlo.add %x, %x : @T0",
        (F,),
        ["3x4xf32"],
    )
    add("stablehlo.custom_call", "%y = stablehlo.custom_call @Sharding(%a) : (@T0) -> @R0", (F,), ["3x4xf32"])
    for algorithm in ("THREE_FRY", "PHILOX", "DEFAULT"):
        for to in ("ui32", "ui64"):
            size = 2 if algorithm == "THREE_FRY" else 3
            add(
                "stablehlo.rng_bit_generator",
                f"%y:2 = stablehlo.rng_bit_generator %a, algorithm = {algorithm} : (@T0) -> (@R0, @R1)",
                (np.arange(7, 7 + size).astype("u8"),),
                [f"{size}xui64", f"5x3x{to}"],
            )


def processes():
    same = " : (@T0) -> @R0"
    lines = {
        "all_gather": f'"stablehlo.all_gather"(%a) {{all_gather_dim = 1 : i64, {GROUPS}}}',
        "all_reduce": f'"stablehlo.all_reduce"(%a) {region("add")} {{{GROUPS}}}',
        "reduce_scatter": f'"stablehlo.reduce_scatter"(%a) {region("add")} {{scatter_dimension = 0 : i64, {GROUPS}}}',
        "all_to_all": '"stablehlo.all_to_all"(%a) {split_dimension = 0 : i64, concat_dimension = 1 : i64, '
        f"split_count = 1 : i64, {GROUPS}}}",
        "collective_broadcast": f'"stablehlo.collective_broadcast"(%a) {{{GROUPS}}}',
        "collective_permute": '"stablehlo.collective_permute"(%a) {source_target_pairs = dense<[[0, '
        "0]]> : tensor<1x2xi64>}",
        "cross-replica-sum": f'"stablehlo.cross-replica-sum"(%a) {{{GROUPS}}}',
    }
    if hasattr(_stablehlo_ops_gen, "CollectiveReduceOp"):  # since jaxlib 0.11
        lines["collective_reduce"] = f'"stablehlo.collective_reduce"(%a) {region("add")} {{{GROUPS}}}'
    for name, line in lines.items():
        add(f"stablehlo.{name}", f"%y = {line}{same}", (F,), ["3x4xf32"])
    for name in ("partition_id", "replica_id"):
        add(f"stablehlo.{name}", f"%y = stablehlo.{name} : @R0", (), ["ui32"])
