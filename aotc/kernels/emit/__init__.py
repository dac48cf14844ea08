"""Loop IR to LLVM IR."""
