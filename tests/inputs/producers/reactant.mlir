#alias_scope_domain = #llvm.alias_scope_domain<id = "d">
module @reactant_loop attributes {mhlo.num_partitions = 1 : i64, mhlo.num_replicas = 1 : i64} {
  func.func @main(%arg0: tensor<4x3xf64> {enzymexla.memory_effects = ["read", "write"], tf.aliasing_output = 0 : i32}, %arg1: tensor<i64> {enzymexla.memory_effects = []}) -> (tensor<4x3xf64>, tensor<i64>) attributes {enzymexla.memory_effects = ["read", "write", "allocate", "free"]} {
    %c = stablehlo.constant dense<0> : tensor<i64>
    %c_0 = stablehlo.constant dense<1> : tensor<i64>
    %cst = arith.constant dense<5.000000e-01> : tensor<3x4xf64>
    %0 = stablehlo.transpose %arg0, dims = [1, 0] : (tensor<4x3xf64>) -> tensor<3x4xf64>
    %1:2 = stablehlo.while(%iterArg = %c, %iterArg_1 = %0) : tensor<i64>, tensor<3x4xf64> attributes {enzymexla.disable_min_cut, enzyme.symmetric = false}
    cond {
      %3 = stablehlo.compare LT, %iterArg, %arg1 : (tensor<i64>, tensor<i64>) -> tensor<i1>
      stablehlo.return %3 : tensor<i1>
    } do {
      %3 = stablehlo.multiply %iterArg_1, %cst {enzymexla.non_negative = [#enzymexla<guaranteed NOTGUARANTEED>]} : tensor<3x4xf64>
      %4 = stablehlo.sine %3 : tensor<3x4xf64>
      %5 = stablehlo.add %iterArg, %c_0 : tensor<i64>
      stablehlo.return %5, %4 : tensor<i64>, tensor<3x4xf64>
    }
    %2 = stablehlo.transpose %1#1, dims = [1, 0] : (tensor<3x4xf64>) -> tensor<4x3xf64>
    return %2, %1#0 : tensor<4x3xf64>, tensor<i64>
  }
}
