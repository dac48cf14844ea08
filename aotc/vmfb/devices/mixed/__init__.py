"""Programs that run partly on a GPU and partly on the host."""
