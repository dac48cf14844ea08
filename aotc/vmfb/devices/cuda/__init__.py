"""The CUDA device: driver, streams, recorded graphs, staging copies, and arrays in GPU memory."""
