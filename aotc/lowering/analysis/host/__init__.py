"""What runs on the host beside a GPU."""
