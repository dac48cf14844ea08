"""Shared parts of region lowering: builder, element expressions, loop nests, library calls."""
