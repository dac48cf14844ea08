"""Kernels as Python functions for Numba: printing, compilation, and comparison with the emitted code."""
