"""Emit LLVM IR from loop IR."""
