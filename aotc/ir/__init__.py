"""The three IRs (tensor, loop, program), symbolic dims and the op table. Imports no stage, no jax, no numba."""
