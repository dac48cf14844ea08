"""Kernels through Numba's front end: their text, its compilation, and its check against the default's code."""
