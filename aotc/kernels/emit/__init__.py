"""Emission of LLVM IR from loop IR: statements, scalar ops, loads and stores, metadata, vectors."""
