"""Matmul and convolution regions: register tiles, loops, shared-memory and tensor-core tiles."""
