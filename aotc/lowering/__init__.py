"""Lower tensor IR to kernels (loop IR) and host programs."""
