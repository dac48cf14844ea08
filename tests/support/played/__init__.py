"""Instructions that this machine may lack, played by Python or by LLVM IR of their meaning."""
