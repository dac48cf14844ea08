"""Importers of StableHLO and CHLO ops, one file per family of the op table."""
