"""Register tiles: the micro-kernels of matmuls, one vector function per tile shape."""
