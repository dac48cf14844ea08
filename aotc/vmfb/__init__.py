"""The bundle format and its runtime, which import only the standard library, numpy, msgpack and ml_dtypes."""
