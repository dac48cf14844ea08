"""Lower tensor IR to kernels (loop IR) and programs."""
