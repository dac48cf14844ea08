"""Importers of StableHLO and CHLO ops, one file for each family of the op table."""
