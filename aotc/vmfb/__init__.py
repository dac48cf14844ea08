"""The bundle and its runtime; standard library, numpy, msgpack and ml_dtypes only."""
