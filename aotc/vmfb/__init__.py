"""The bundle format and its runtime. Imports the standard library, numpy, msgpack and ml_dtypes only."""
