"""One model as many ranks: which part of each array a rank has, and how ranks exchange arrays."""
