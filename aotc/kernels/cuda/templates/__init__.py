"""Kernel templates for tensor cores in numba.cuda; operand loads and epilogues are device functions from loop IR."""
