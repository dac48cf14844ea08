"""Bundles for the tests on Ray, whose environment has no compiler: ``python -m serve.ray_bundles FOLDER``."""

import json
import sys
from pathlib import Path

from serve import sharded_text
from support import small_sharded

PROMPTS, COUNT = ([3, 1, 4], [1, 5, 9], [2, 6, 5, 3, 5]), 8


def write_bundles(folder):
    """Write small sharded models for 2 and 4 ranks, a language model for 2, its weights, and its tokens by JAX."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in (2, 4):
        small_sharded.bundle(size).save(folder / f"layer{size}.vmfb")
    sharded_text.sharded().save(folder / "text.vmfb")
    sharded_text.save_checkpoint(folder / "checkpoint.safetensors")
    tokens = [[prompt, sharded_text.by_jax(prompt, COUNT)] for prompt in PROMPTS]
    (folder / "tokens.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    write_bundles(Path(sys.argv[1]))
