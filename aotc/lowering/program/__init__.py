"""Kernels and values to a program: memory, schedule, host code."""
