"""Importers of custom calls, by call target."""
