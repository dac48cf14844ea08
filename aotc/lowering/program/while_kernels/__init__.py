"""While loops as a single kernel."""
