"""What runs command buffers: CPU threads, CUDA GPUs."""
