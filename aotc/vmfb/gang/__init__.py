"""Ranks as child processes of this one, which runs them with whole arrays."""
