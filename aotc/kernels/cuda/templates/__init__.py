"""Kernels written for numba.cuda: what they compute beside their pattern are device functions of the loop IR."""
