"""What ops become on GPUs before they are fused."""
