"""Tensor IR: modules of StableHLO-like ops, with text form, verifier and interpreter."""
