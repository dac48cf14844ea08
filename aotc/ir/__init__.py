"""The three IRs, what their text is, what they mean, and the op table: no stage, no jax, no numba."""
