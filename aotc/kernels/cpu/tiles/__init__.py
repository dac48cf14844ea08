"""Register tiles: micro-kernels of matmuls, one LLVM function for each tile shape."""
