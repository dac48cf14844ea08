"""Collectives between GPUs by NCCL, called through ctypes."""
