module @jit_mlp attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32, ttcore.meshes = #ttcore.meshes<[<"mesh" = 1x1>]>} {
  func.func public @main(%arg0: tensor<32x32xbf16> {ttcore.argument_type = #ttcore.argument_type<input>, ttcore.shard_status = #ttcore.shard_status<unsharded>}, %arg1: tensor<32x32xbf16> {ttcore.argument_type = #ttcore.argument_type<parameter>}, %arg2: tensor<32xbf16>) -> (tensor<32x32xbf16> {jax.result_info = "", ttcore.shard_status = #ttcore.shard_status<unsharded>}) {
    %0 = stablehlo.custom_call @tt.mark_argument(%arg0) {api_version = 0 : i32, mhlo.frontend_attributes = {ttcore.argument_type = "input", ttir.name = "x"}} : (tensor<32x32xbf16>) -> tensor<32x32xbf16>
    %1 = stablehlo.dot_general %0, %arg1, contracting_dims = [1] x [0] {tt.nested = {grid = [#tt.grid<8x8>]}} : (tensor<32x32xbf16>, tensor<32x32xbf16>) -> tensor<32x32xbf16>
    %2 = stablehlo.broadcast_in_dim %arg2, dims = [1] : (tensor<32xbf16>) -> tensor<32x32xbf16>
    %3 = stablehlo.add %1, %2 : tensor<32x32xbf16>
    %4 = stablehlo.composite "tenstorrent.relu" %3 {composite_attributes = {layout = "tile"}, decomposition = @tenstorrent.relu.impl} : (tensor<32x32xbf16>) -> tensor<32x32xbf16>
    return %4 : tensor<32x32xbf16>
  }
  func.func private @tenstorrent.relu.impl(%arg0: tensor<32x32xbf16>) -> tensor<32x32xbf16> {
    %cst = arith.constant dense<0.000000e+00> : tensor<32x32xbf16>
    %0 = stablehlo.maximum %arg0, %cst : tensor<32x32xbf16>
    return %0 : tensor<32x32xbf16>
  }
}
