module attributes {torch.debug_module_name = "Block"} {
  func.func private @scaled(%n: index, %x: tensor<?x?xf32>) -> (tensor<?x?xf32>, index) {
    %one = arith.constant 1 : index
    %i = arith.index_cast %n : index to i64
    %f = arith.sitofp %i : i64 to f32
    %r = math.rsqrt %f : f32
    %t = tensor.from_elements %r : tensor<f32>
    %0 = chlo.broadcast_multiply %x, %t : (tensor<?x?xf32>, tensor<f32>) -> tensor<?x?xf32>
    %m = arith.addi %n, %one : index
    return %0, %m : tensor<?x?xf32>, index
  }
  func.func @main(%arg0: tensor<?x?xf32>, %arg1: tensor<?x?xf32>, %arg2: tensor<?xf32>) -> (tensor<?x?xf32>, tensor<?x?xf32>, i64) {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c0_i64 = arith.constant 0 : i64
    %c3_i64 = arith.constant 3 : i64
    %rows = tensor.dim %arg0, %c0 : tensor<?x?xf32>
    %inner = tensor.dim %arg0, %c1 : tensor<?x?xf32>
    %other = tensor.dim %arg1, %c0 : tensor<?x?xf32>
    %columns = tensor.dim %arg1, %c1 : tensor<?x?xf32>
    %same = arith.cmpi eq, %inner, %other : index
    cf.assert %same, "mismatching contracting dimension for torch.aten.mm"
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<?x?xf32>, tensor<?x?xf32>) -> tensor<?x?xf32>
    %1 = chlo.broadcast_add %0, %arg2 : (tensor<?x?xf32>, tensor<?xf32>) -> tensor<?x?xf32>
    %2:2 = func.call @scaled(%columns, %1) : (index, tensor<?x?xf32>) -> (tensor<?x?xf32>, index)
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %r64 = arith.index_cast %rows : index to i64
    %c64 = arith.index_cast %columns : index to i64
    %shape = tensor.from_elements %r64, %c64 : tensor<2xi64>
    %zeros = stablehlo.dynamic_broadcast_in_dim %zero, %shape, dims = [] : (tensor<f32>, tensor<2xi64>) -> tensor<?x?xf32>
    %relu = stablehlo.maximum %2#0, %zeros : tensor<?x?xf32>
    %big = arith.cmpi sgt, %r64, %c3_i64 : i64
    %3 = scf.if %big -> (tensor<?x?xf32>) {
      %neg = stablehlo.negate %relu : tensor<?x?xf32>
      scf.yield %neg : tensor<?x?xf32>
    } else {
      scf.yield %relu : tensor<?x?xf32>
    }
    %total = arith.muli %r64, %c64 : i64
    %positive = arith.maxsi %total, %c0_i64 : i64
    %flip = tensor.from_elements %c64, %r64 : tensor<2xi64>
    %4 = stablehlo.dynamic_reshape %3, %flip : (tensor<?x?xf32>, tensor<2xi64>) -> tensor<?x?xf32>
    return %3, %4, %positive : tensor<?x?xf32>, tensor<?x?xf32>, i64
  }
}
