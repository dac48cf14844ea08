"""Devices that run command buffers: CPU threads, CUDA GPUs, and both in one program."""
