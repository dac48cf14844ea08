"""Several models as the functions of one module."""
