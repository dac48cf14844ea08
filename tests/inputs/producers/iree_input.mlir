module @module attributes {iree.fixedpoint.iteration = 0 : index, "onnx-mlir.symbol-postfix" = "model"} {
  func.func @main(%arg0: tensor<?x12xf32> {iree.identifier = "x", onnx.name = "input"}) -> (tensor<?x4xf32> {iree.identifier = "y", onnx.name = "output"}) attributes {iree.abi.stub, iree.reflection = {}} {
    %c0 = arith.constant 0 : index
    %cst = arith.constant 1.000000e-03 : f32
    %d = tensor.dim %arg0, %c0 : tensor<?x12xf32>
    %0 = tensor.expand_shape %arg0 [[0], [1, 2]] output_shape [%d, 4, 3] : tensor<?x12xf32> into tensor<?x4x3xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [2] : (tensor<?x4x3xf32>, tensor<f32>) -> tensor<?x4xf32>
    %2 = math.absf %1 : tensor<?x4xf32>
    %3 = tensor.splat %cst[%d] : tensor<?x4xf32>
    %4 = arith.addf %2, %3 : tensor<?x4xf32>
    %5 = math.log2 %4 : tensor<?x4xf32>
    %6 = tensor.generate %d {
    ^bb0(%i: index, %j: index):
      %v = tensor.extract %5[%i, %j] : tensor<?x4xf32>
      %k = arith.index_cast %j : index to i32
      %f = arith.sitofp %k : i32 to f32
      %s = arith.mulf %v, %f : f32
      tensor.yield %s : f32
    } : tensor<?x4xf32>
    return %6 : tensor<?x4xf32>
  }
}
