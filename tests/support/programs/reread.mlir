func.func public @main(%x: tensor<512x512xf32>) -> tensor<512x512xf32> {
 %y = stablehlo.sine %x : tensor<512x512xf32>
 %p = stablehlo.dot_general %y, %x, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
 %q = stablehlo.dot_general %p, %p, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
 %r = stablehlo.dot_general %q, %p, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
 %t = stablehlo.dot_general %r, %y, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
 %u = stablehlo.dot_general %t, %y, contracting_dims = [1] x [1] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
 return %u : tensor<512x512xf32>
}
