"""Lower fused regions to kernels in loop IR."""
