"""libcuda by ctypes: its functions, graphs, and the loops that a GPU turns by itself."""
