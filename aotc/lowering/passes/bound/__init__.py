"""Passes for arguments that a module is given once: what is computed of them alone becomes a function of its own."""
