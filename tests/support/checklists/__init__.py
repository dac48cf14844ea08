"""A case for each name of StableHLO and CHLO that jaxlib knows, by family."""
