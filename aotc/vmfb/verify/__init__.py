"""Verification of untrusted bundles: schema, programs, signatures and memory bounds."""
