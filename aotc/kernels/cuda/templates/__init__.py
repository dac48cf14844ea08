"""Hand-written numba.cuda kernels; prologues and epilogues are device functions from loop IR."""
