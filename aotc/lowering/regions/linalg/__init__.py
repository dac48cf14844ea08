"""Linear algebra regions: Cholesky, triangular solve, LU, QR, eigenvalues, sparse products."""
