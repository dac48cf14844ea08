"""Attention regions: blocked and decoding kernels for CPUs, template calls for GPUs."""
