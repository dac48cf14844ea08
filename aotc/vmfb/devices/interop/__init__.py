"""What kernels took when they were measured: the record, and the measuring."""
