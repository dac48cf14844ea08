"""The importers of StableHLO's and CHLO's ops, a file per family of the op table."""
