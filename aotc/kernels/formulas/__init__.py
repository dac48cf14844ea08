"""Elementary functions as formulas, and the algebra that emits them as LLVM IR."""
