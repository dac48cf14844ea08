"""Code generation: loop IR to machine code for CPUs and GPUs."""
