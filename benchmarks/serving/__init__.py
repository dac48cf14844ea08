"""The server next to direct calls."""
