"""The pass ``pack_contractions``: operand layouts of matmuls and convolutions."""
