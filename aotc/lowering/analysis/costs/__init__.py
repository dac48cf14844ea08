"""What kernels and ops cost on a device: predicted from the loop IR, or measured; asked through ``Costs`` alone."""
