"""Times of kernels and ops on a device, predicted from loop IR or measured."""
