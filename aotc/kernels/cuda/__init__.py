"""Code generation for CUDA GPUs: kernels emitted from loop IR, and templates in numba.cuda."""
