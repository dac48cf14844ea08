"""Callable entries of a loaded module: signatures, bound arguments, state, parameters and limits."""
