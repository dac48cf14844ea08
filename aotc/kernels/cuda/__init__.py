"""CUDA kernels through numba.cuda."""
