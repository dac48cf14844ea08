"""Buffer ownership: values that share memory, and the remaining copies."""
