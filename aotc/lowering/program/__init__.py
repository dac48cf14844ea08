"""Turn a fused module and its kernels into a program: memory, schedule, host code."""
