"""Meaning of the tensor IR: a verifier by the type rules of its ops, and an interpreter."""
