"""Execution of programs with GPU memory: on one GPU, or on the CPU and several GPUs together."""
