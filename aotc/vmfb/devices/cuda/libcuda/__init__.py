"""ctypes bindings of libcuda: driver functions, graphs, and loops that run on the GPU."""
