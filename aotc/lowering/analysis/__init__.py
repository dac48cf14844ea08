"""Facts about programs that several parts of lowering ask for."""
