"""Facts about tensor programs; no decisions."""
