"""Commands on the weights of bundles."""
