"""Fused regions to kernels in loop IR."""
