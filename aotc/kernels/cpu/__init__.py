"""CPU kernels: LLVM emission, Numba, linking, the executor."""
