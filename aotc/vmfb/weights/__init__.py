"""Constants and weights of bundles: in a segment of the bundle, or in separate safetensors files."""
