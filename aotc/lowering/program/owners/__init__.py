"""Buffer ownership: decide which values share memory, and avoid copies."""
