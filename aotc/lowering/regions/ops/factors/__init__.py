"""LU factors on GPUs."""
