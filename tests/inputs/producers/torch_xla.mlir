module @SyncTensorsGraph.42 attributes {mhlo.cross_program_prefetches = [], mhlo.is_dynamic = false, mhlo.use_auto_spmd_partitioning = false} {
  func.func @main(%arg0: tensor<16x8xf32> {mhlo.sharding = "{replicated}"}, %arg1: tensor<i32>, %arg2: tensor<3x8x8xf32>,
                  %arg3: tensor<8x32xf32>, %arg4: tensor<32x8xf32>, %arg5: tensor<8xf32>)
      -> tuple<tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<i32>> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %eps = stablehlo.constant dense<1.0e-5> : tensor<16xf32>
    %eighth = stablehlo.constant dense<0.125> : tensor<16xf32>
    %half = stablehlo.constant dense<0.5> : tensor<16x32xf32>
    %one = stablehlo.constant dense<1.0> : tensor<16x32xf32>
    %root = stablehlo.constant dense<0.707106769> : tensor<16x32xf32>
    %marked = stablehlo.custom_call @Sharding(%arg0) {backend_config = "", mhlo.sharding = "{replicated}"} : (tensor<16x8xf32>) -> tensor<16x8xf32>
    %x = stablehlo.set_dimension_size %marked, %arg1, dim = 0 : (tensor<16x8xf32>, tensor<i32>) -> tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %eps_n = stablehlo.set_dimension_size %eps, %arg1, dim = 0 : (tensor<16xf32>, tensor<i32>) -> tensor<?xf32, #stablehlo.bounds<16>>
    %eighth_n = stablehlo.set_dimension_size %eighth, %arg1, dim = 0 : (tensor<16xf32>, tensor<i32>) -> tensor<?xf32, #stablehlo.bounds<16>>
    %square = stablehlo.multiply %x, %x : tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %sum = stablehlo.reduce(%square init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<f32>) -> tensor<?xf32, #stablehlo.bounds<16>>
    %mean = stablehlo.multiply %sum, %eighth_n : tensor<?xf32, #stablehlo.bounds<16>>
    %var = stablehlo.add %mean, %eps_n : tensor<?xf32, #stablehlo.bounds<16>>
    %inv = stablehlo.rsqrt %var : tensor<?xf32, #stablehlo.bounds<16>>
    %wide = stablehlo.broadcast_in_dim %inv, dims = [0] : (tensor<?xf32, #stablehlo.bounds<16>>) -> tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %normed = stablehlo.multiply %x, %wide : tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %w0 = stablehlo.slice %arg2 [0:1, 0:8, 0:8] : (tensor<3x8x8xf32>) -> tensor<1x8x8xf32>
    %w1 = stablehlo.slice %arg2 [1:2, 0:8, 0:8] : (tensor<3x8x8xf32>) -> tensor<1x8x8xf32>
    %w2 = stablehlo.slice %arg2 [2:3, 0:8, 0:8] : (tensor<3x8x8xf32>) -> tensor<1x8x8xf32>
    %wq = stablehlo.reshape %w0 : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %wk = stablehlo.reshape %w1 : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %wv = stablehlo.reshape %w2 : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %q = stablehlo.dot_general %normed, %wq, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<8x8xf32>) -> tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %k = stablehlo.dot_general %normed, %wk, contracting_dims = [1] x [0] : (tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<8x8xf32>) -> tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %v = stablehlo.dot_general %normed, %wv, contracting_dims = [1] x [0] : (tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<8x8xf32>) -> tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %scores = stablehlo.dot_general %q, %k, contracting_dims = [1] x [1] : (tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<?x8xf32, #stablehlo.bounds<16, ?>>) -> tensor<?x?xf32, #stablehlo.bounds<16, 16>>
    %most = stablehlo.reduce(%scores init: %low) applies stablehlo.maximum across dimensions = [1] : (tensor<?x?xf32, #stablehlo.bounds<16, 16>>, tensor<f32>) -> tensor<?xf32, #stablehlo.bounds<16>>
    %most_t = stablehlo.transpose %scores, dims = [1, 0] : (tensor<?x?xf32, #stablehlo.bounds<16, 16>>) -> tensor<?x?xf32, #stablehlo.bounds<16, 16>>
    %n = stablehlo.get_dimension_size %scores, dim = 1 : (tensor<?x?xf32, #stablehlo.bounds<16, 16>>) -> tensor<i32>
    %n1 = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
    %nn = stablehlo.concatenate %n1, %n1, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
    %most_w = stablehlo.dynamic_broadcast_in_dim %most, %nn, dims = [0] : (tensor<?xf32, #stablehlo.bounds<16>>, tensor<2xi32>) -> tensor<?x?xf32, #stablehlo.bounds<16, 16>>
    %shifted = stablehlo.subtract %scores, %most_w : tensor<?x?xf32, #stablehlo.bounds<16, 16>>
    %exp = stablehlo.exponential %shifted : tensor<?x?xf32, #stablehlo.bounds<16, 16>>
    %total = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<?x?xf32, #stablehlo.bounds<16, 16>>, tensor<f32>) -> tensor<?xf32, #stablehlo.bounds<16>>
    %total_w = stablehlo.dynamic_broadcast_in_dim %total, %nn, dims = [0] : (tensor<?xf32, #stablehlo.bounds<16>>, tensor<2xi32>) -> tensor<?x?xf32, #stablehlo.bounds<16, 16>>
    %soft = stablehlo.divide %exp, %total_w : tensor<?x?xf32, #stablehlo.bounds<16, 16>>
    %mixed = stablehlo.dot_general %soft, %v, contracting_dims = [1] x [0] : (tensor<?x?xf32, #stablehlo.bounds<16, 16>>, tensor<?x8xf32, #stablehlo.bounds<16, ?>>) -> tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %resid = stablehlo.add %x, %mixed : tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %full = stablehlo.constant dense<16> : tensor<i32>
    %static = stablehlo.set_dimension_size %resid, %full, dim = 0 : (tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<i32>) -> tensor<16x8xf32>
    %up = stablehlo.dot_general %static, %arg3, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x32xf32>) -> tensor<16x32xf32>
    %scaled = stablehlo.multiply %up, %root : tensor<16x32xf32>
    %erf = stablehlo.custom_call @mhlo.erf(%scaled) {mhlo.attributes = {}, mhlo.version = 1 : i64} : (tensor<16x32xf32>) -> tensor<16x32xf32>
    %plus = stablehlo.add %erf, %one : tensor<16x32xf32>
    %halved = stablehlo.multiply %up, %half : tensor<16x32xf32>
    %gelu = stablehlo.multiply %halved, %plus : tensor<16x32xf32>
    %down = stablehlo.dot_general %gelu, %arg4, contracting_dims = [1] x [0] : (tensor<16x32xf32>, tensor<32x8xf32>) -> tensor<16x8xf32>
    %bias = stablehlo.broadcast_in_dim %arg5, dims = [1] : (tensor<8xf32>) -> tensor<16x8xf32>
    %biased = stablehlo.add %down, %bias : tensor<16x8xf32>
    %cut = stablehlo.set_dimension_size %biased, %arg1, dim = 0 : (tensor<16x8xf32>, tensor<i32>) -> tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %out = stablehlo.add %resid, %cut : tensor<?x8xf32, #stablehlo.bounds<16, ?>>
    %size = stablehlo.get_dimension_size %out, dim = 0 : (tensor<?x8xf32, #stablehlo.bounds<16, ?>>) -> tensor<i32>
    %both = stablehlo.tuple %out, %size {xla_shape = "(f32[<=16,8]{1,0}, s32[])"} : tuple<tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<i32>>
    return %both : tuple<tensor<?x8xf32, #stablehlo.bounds<16, ?>>, tensor<i32>>
  }
}
