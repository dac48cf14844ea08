"""Commands that listen on a network."""
