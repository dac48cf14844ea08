"""Plans of matrix factorisations, triangular solves and Fourier transforms."""
