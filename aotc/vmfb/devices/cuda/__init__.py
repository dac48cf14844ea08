"""The CUDA device: driver, streams, graphs, staging and resident arrays."""
