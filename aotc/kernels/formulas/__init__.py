"""Elementary functions as formulas, and the algebra that writes them as LLVM IR."""
