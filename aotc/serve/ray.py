"""The server as a Ray Serve deployment: replicas on several machines, behind Ray's HTTP proxy.

Needs ``aotc[ray]``. Replicas on one machine map the same file, so they share its weights. A replica of a sharded bundle
is a gang: all its ranks, on one host or on several, which Ray places together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.util import get_current_placement_group

from aotc.serve.asgi import AsgiApp
from aotc.serve.ray_gang import PACK, RayGang, hide_gpus, host_resources, mesh_for_hosts
from aotc.serve.repository import bundles_of_entry, folder_entries
from aotc.serve.settings import Settings
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.ranks.layout import mesh_of

CPU, CUDA = "cpu", "cuda"


def application(settings: Settings, *, hosts: int = 1, gpus: int | None = None, **options: Any) -> Any:
    """Return an application for ``ray.serve.run``.

    Parameters
    ----------
    settings : Settings
        ``source`` must exist on every machine. Each replica requests a GPU from Ray if ``devices`` is a GPU. Host,
        port, TLS and gRPC settings are ignored: Ray's proxy has its own.
    hosts : int
        Hosts of each replica of a sharded bundle. With 1 the ranks are processes of the replica, which requests the
        cores and GPUs of all. With more, the ranks are actors in a placement group of the replica, with an equal share
        of the ranks for each host: Ray starts a replica with all its ranks, or not at all. ``source`` must be a bundle
        then, and a new file is served by the next ``ray.serve.run``.
    gpus : int, optional
        GPUs of each rank of a sharded bundle, 0 or 1; by default 1 if the bundle has code for GPUs.
    **options
        Options of ``ray.serve.deployment``: ``num_replicas``, ``autoscaling_config``, ``ray_actor_options``...

    Raises
    ------
    CallError
        If a setting is invalid.
    BundleError
        If there are several hosts, and the bundle is not for ranks that can be divided among them.
    """
    # Ray assigns cores, so one thread is the default; requests to its proxy have the cluster's name, not this
    # machine's.
    settings = replace(settings.check(), threads=settings.threads or 1, insecure=True)
    gpus = gpus_per_rank(settings) if gpus is None else gpus
    hides_gpus = gpus == 0 and ranks_of(settings) > 0
    if hosts == 1:
        resources: dict[str, Any] = {"ray_actor_options": actor_options(settings, gpus)}
    else:
        resources = _options_of_group(settings, hosts, gpus)
        start = partial(_start_in_placement_group, hosts=hosts, gpus=gpus)
        settings = replace(settings, start_ranks=start, poll=0.0)

    def build() -> AsgiApp:
        if hides_gpus:
            hide_gpus()
        return AsgiApp(settings)

    actor = {**resources.pop("ray_actor_options"), **options.pop("ray_actor_options", {})}
    options = {"name": "aotc", "max_ongoing_requests": settings.queue, **resources, **options}
    return serve.deployment(serve.ingress(build)(), ray_actor_options=actor, **options).bind()


def _options_of_group(settings: Settings, hosts: int, gpus: int) -> dict[str, Any]:
    """Return the options of a deployment whose replicas are gangs on several hosts.

    The replica itself only passes requests to its ranks; it uses their cores.
    """
    if settings.source.is_dir():
        raise CallError("", "several hosts serve one sharded bundle", str(settings.source), "the path of a bundle")
    mesh = mesh_for_hosts(open_bundle(str(settings.source)), hosts, settings.ranks)
    return {
        "ray_actor_options": {"num_cpus": 0, "num_gpus": 0},
        "placement_group_bundles": host_resources(mesh, hosts, settings.threads or 1, gpus),
        "placement_group_strategy": PACK,
    }


def _start_in_placement_group(path: str, **keywords: Any) -> RayGang:
    """Start the ranks in the placement group of this replica; the server restarts them after a loss."""
    return RayGang(path, group=get_current_placement_group(), restart=False, **keywords)


def applications(
    settings: Settings, cpu: Mapping[str, Any] | None = None, gpu: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an application for each kind of device that the bundles support: ``{"cuda": ..., "cpu": ...}``.

    Run them in this order: a replica without a GPU may occupy the cores of a machine with a GPU. The replicas of each
    application load the bundles that their kind of machine can run, and report the others as unavailable.

    Parameters
    ----------
    settings : Settings
        The application sets ``devices`` for its kind, except for sharded bundles, whose ranks choose their own.
    cpu, gpu : mapping, optional
        Options of :func:`application` for each kind.

    Raises
    ------
    CallError
        If a setting is invalid, or no bundle can be read.
    """
    made, options = {}, {CPU: cpu or {}, CUDA: gpu or {}}
    is_sharded = ranks_of(settings.check()) > 0
    for kind in sorted(kinds_of(settings.source), reverse=True):
        own = {"name": f"aotc-{kind}", **({"gpus": int(kind == CUDA)} if is_sharded else {}), **options[kind]}
        devices = CPU if kind == CPU else f"{CUDA}:0"  # of the GPUs that Ray assigns to the replica
        made[kind] = application(settings if is_sharded else replace(settings, devices=devices), **own)
    return made


def kinds_of(source: Path) -> set[str]:
    """Return the device kinds for which a bundle, or the bundles of a folder, have code.

    Raises
    ------
    CallError
        If no bundle can be read.
    """
    manifests, reason = _read_manifests(source)
    kinds = _variant_kinds(manifests)
    if not kinds:
        raise CallError("", "no bundle can be read", f"{source}: {reason}")
    return kinds


def ranks_of(settings: Settings) -> int:
    """Return the number of ranks that a replica runs: those of the largest mesh; 0 for bundles of one device."""
    manifests, _ = _read_manifests(settings.source)
    return settings.ranks or max((mesh_of(m["mesh"]).size for m in manifests if "mesh" in m), default=0)


def gpus_per_rank(settings: Settings) -> int:
    """Return 1 if a sharded bundle has code for GPUs, else 0."""
    manifests, _ = _read_manifests(settings.source)
    return int(CUDA in _variant_kinds([m for m in manifests if "mesh" in m]))


def _read_manifests(source: Path) -> tuple[list[Mapping[str, Any]], str]:
    """Return the manifests of a bundle, or of the bundles of a folder, and why the last unreadable one is."""
    if source.is_dir():
        paths = [path for name, entry in folder_entries(source) for _, path in bundles_of_entry(name, entry)]
    else:
        paths = [source]
    manifests, reason = list[Mapping[str, Any]](), "no bundle"
    for path in paths:
        try:
            manifests.append(open_bundle(str(path)).manifest)
        except (BundleError, OSError) as error:
            reason = str(error)
    return manifests, reason


def _variant_kinds(manifests: Sequence[Mapping[str, Any]]) -> set[str]:
    return {variant["kind"] for manifest in manifests for variant in manifest["variants"]}


def actor_options(settings: Settings, gpus: int | None = None) -> Mapping[str, Any]:
    """Return the resources that a replica requests from Ray.

    They are a core per thread, and a GPU if it runs on one; for a sharded bundle those of all ranks.

    Parameters
    ----------
    settings : Settings
    gpus : int, optional
        GPUs of each rank of a sharded bundle; by default as :func:`gpus_per_rank` says.
    """
    threads, ranks = settings.threads or 1, ranks_of(settings)
    if ranks:
        return {"num_cpus": ranks * threads, "num_gpus": ranks * (gpus_per_rank(settings) if gpus is None else gpus)}
    wants_gpu = isinstance(settings.devices, str) and settings.devices.startswith(CUDA)
    return {"num_cpus": threads, "num_gpus": int(wants_gpu)}
