"""Tensors over gRPC: the Open Inference Protocol of Triton, its wire format, streams and reads."""
