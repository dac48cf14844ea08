"""The pass ``parallelize_gpu``: sorts, scatters and decompositions as parallel GPU algorithms."""
