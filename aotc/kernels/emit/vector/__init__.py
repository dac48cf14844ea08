"""Emit vector loops: lanes, SVE, transposes and FFT passes."""
