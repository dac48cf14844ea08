"""Compile a model to a bundle: signatures, weights, state, assembly and the bundle cache."""
