"""What the bodies of kernels say that templates compute otherwise."""
