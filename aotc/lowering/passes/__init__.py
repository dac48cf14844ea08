"""Tensor IR passes, one file or folder per row of :data:`aotc.pipeline.PASSES`."""
