"""Elementary functions as formulas over an abstract scalar algebra, and the algebra that emits LLVM IR."""
