"""Array exchange with other libraries: DLPack and host arrays."""
