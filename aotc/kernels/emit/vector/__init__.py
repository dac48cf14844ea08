"""Emit explicit vector code: loops, SVE, transposes and passes of Fourier transforms."""
