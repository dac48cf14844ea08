"""Import of quantized types as their storage integers, and of the ops on them."""
