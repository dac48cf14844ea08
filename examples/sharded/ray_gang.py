"""A sharded model on the machines of a Ray cluster, for arguments of ones; the bundle is on every machine.

    python ray_gang.py /shared/model.vmfb HOSTS [/shared/shards]
"""

import sys

import numpy as np
import ray

from aotc.serve.ray_gang import RayGang
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import RankLost


def main(bundle: str, hosts: str, weights: str | None = None) -> None:
    """Call the function ``main`` once, and once more if a rank is lost."""
    ray.init()
    rows = open_bundle(bundle).manifest["functions"]["main"]["arguments"]
    ones = [np.ones(row.get("whole", row["dims"]), to_numpy(row["dtype"])) for row in rows]  # whole arrays
    with RayGang(bundle, hosts=int(hosts), weights=weights) as gang:
        try:
            results = gang.invoke("main", *ones)
        except RankLost as error:
            print(error)
            results = gang.invoke("main", *ones)  # on new ranks
        print(f"{gang.mesh} on {hosts} hosts:", *(f"{np.sum(x, dtype=np.float64):.6g}" for x in results))


if __name__ == "__main__":
    main(*sys.argv[1:])
