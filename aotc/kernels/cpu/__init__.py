"""Code generation for CPUs: compilation and linking of kernels, and the executor that runs them."""
