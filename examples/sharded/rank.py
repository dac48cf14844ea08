"""One rank of a sharded model, under any launcher: the sums of its parts of the results, for arguments of ones.

    torchrun --nproc-per-node 2 rank.py model.vmfb [shards]
"""

import sys

import numpy as np

import aotc
from aotc.vmfb.dtypes import to_numpy


def main(bundle: str, weights: str | None = None) -> None:
    """Run the default function once; all ranks do so together."""
    with aotc.load(bundle, weights=weights) as module:
        ones = [np.ones(spec.shape, to_numpy(spec.dtype)) for spec in module.inputs]  # this rank's parts
        sums = [f"{np.sum(x, dtype=np.float64):.6g}" for x in module.invoke(module.default_name(), *ones)]
        print(f"rank {module.rank} of {module.mesh.size}:", *sums)


if __name__ == "__main__":
    main(*sys.argv[1:])
