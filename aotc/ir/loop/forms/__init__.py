"""Structured loop IR statements: matmul and convolution tiles, attention, FFT."""
