"""Parallel compilation of kernels by processes and threads, and the on-disk cache of compiled kernels."""
