"""The server as a Ray Serve deployment: replicas on several machines, behind Ray's HTTP proxy.

Needs ``aotc[ray]``. Replicas on one machine map the same file, so they share its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve

from aotc.serve.asgi import AsgiApp
from aotc.serve.repository import bundles_of_entry, folder_entries
from aotc.serve.settings import Settings
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import BundleError, CallError

CPU, CUDA = "cpu", "cuda"


def application(settings: Settings, **options: Any) -> Any:
    """Return an application for ``ray.serve.run``.

    Parameters
    ----------
    settings : Settings
        ``source`` must exist on every machine. Each replica requests a GPU from Ray if ``devices`` is a GPU. Host,
        port, TLS and gRPC settings are ignored: Ray's proxy has its own.
    **options
        Options of ``ray.serve.deployment``: ``num_replicas``, ``autoscaling_config``, ``ray_actor_options``...

    Raises
    ------
    CallError
        If a setting is invalid.
    """
    # Ray assigns cores, so one thread is the default; requests to its proxy have the cluster's name, not this
    # machine's.
    settings = replace(settings.check(), threads=settings.threads or 1, insecure=True)

    def build() -> AsgiApp:
        return AsgiApp(settings)

    actor = {**actor_options(settings), **options.pop("ray_actor_options", {})}
    options = {"name": "aotc", "max_ongoing_requests": settings.queue, **options}
    return serve.deployment(serve.ingress(build)(), ray_actor_options=actor, **options).bind()


def applications(
    settings: Settings, cpu: Mapping[str, Any] | None = None, gpu: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an application for each kind of device that the bundles support: ``{"cuda": ..., "cpu": ...}``.

    Run them in this order: a replica without a GPU may occupy the cores of a machine with a GPU. The replicas of each
    application load the bundles that their kind of machine can run, and report the others as unavailable.

    Parameters
    ----------
    settings : Settings
        The application sets ``devices`` for its kind.
    cpu, gpu : mapping, optional
        Options of :func:`application` for each kind.

    Raises
    ------
    CallError
        If a setting is invalid, or no bundle can be read.
    """
    made, options = {}, {CPU: cpu or {}, CUDA: gpu or {}}
    for kind in sorted(kinds_of(settings.check().source), reverse=True):
        devices = CPU if kind == CPU else f"{CUDA}:0"  # of the GPUs that Ray assigns to the replica
        made[kind] = application(replace(settings, devices=devices), **{"name": f"aotc-{kind}", **options[kind]})
    return made


def kinds_of(source: Path) -> set[str]:
    """Return the device kinds for which a bundle, or the bundles of a folder, have code.

    Raises
    ------
    CallError
        If no bundle can be read.
    """
    if source.is_dir():
        paths = [path for name, entry in folder_entries(source) for _, path in bundles_of_entry(name, entry)]
    else:
        paths = [source]
    kinds, reason = set(), "no bundle"
    for path in paths:
        try:
            kinds |= {v["kind"] for v in open_bundle(str(path), copy=True).manifest["variants"]}
        except (BundleError, OSError) as error:
            reason = str(error)
    if not kinds:
        raise CallError("", "there is no bundle to make replicas for", f"{source}: {reason}")
    return kinds


def actor_options(settings: Settings) -> Mapping[str, Any]:
    """Return the resources that a replica requests from Ray: a core per thread, and a GPU if it runs on one."""
    wants_gpu = isinstance(settings.devices, str) and settings.devices.startswith(CUDA)
    return {"num_cpus": settings.threads or 1, "num_gpus": int(wants_gpu)}
