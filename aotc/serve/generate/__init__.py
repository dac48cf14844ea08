"""Text generation: requests, sampling, batched decoding and cached sequences."""
