"""Plans of fused attention: blocks, tiles and parts of its terms on CPUs and GPUs."""
