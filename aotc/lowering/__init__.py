"""Tensor IR to loop IR, command buffers and VM programs."""
