"""A sharded model on Ray Serve: gangs of ranks as replicas, which start and stop with the load.

    python ray_serve.py /shared/model.vmfb HOSTS [/shared/shards]

The bundle and its weights are on every machine. The server answers at http://HEAD:8000/v2/models/model.
"""

import sys
from pathlib import Path

from ray import serve

from aotc.serve.ray import application
from aotc.serve.settings import Settings

SCALING = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 2}


def main(bundle: str, hosts: str, weights: str | None = None) -> None:
    """Serve until the program is interrupted; each replica has its ranks on ``hosts`` hosts."""
    settings = Settings(Path(bundle), threads=4, weights=None if weights is None else Path(weights))
    app = application(settings, hosts=int(hosts), autoscaling_config=SCALING)
    serve.run(app, name="aotc", route_prefix="/", blocking=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
