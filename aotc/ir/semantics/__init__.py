"""What tensor IR means: verification by the rules of its ops, and an interpreter."""
