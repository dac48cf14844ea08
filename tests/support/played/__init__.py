"""Emulation of instructions that this machine may lack, in Python or in LLVM IR."""
