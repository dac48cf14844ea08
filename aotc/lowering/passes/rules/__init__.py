"""The rewrites that canonicalize applies until none does."""
