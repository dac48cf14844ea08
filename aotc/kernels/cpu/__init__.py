"""CPU kernels: compilation, linking and the executor."""
