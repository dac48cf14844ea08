"""An element of a region as scalars of the loop IR, and loops around it: what plans try and lowerings emit."""
