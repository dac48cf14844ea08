"""Code that several lowerings of regions share: library calls, roundings, padding of shared memory."""
