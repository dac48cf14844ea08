"""``aotc doctor``: installed and missing components, with installation commands."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

SUMMARY = "Check the installation: packages, CPU, GPU, cache, threads."
EXAMPLES = """
Check this installation:

aotc doctor
"""
_EXTRAS = {
    "compile": "to compile", "cuda-compile": "only to compile for CUDA", "sign": "only for signatures",
    "serve": "only to serve bundles",
}  # fmt: skip
_PACKAGES = (
    ("numpy", ""),
    ("msgpack", ""),
    ("ml_dtypes", ""),
    ("typer", ""),
    ("rich", ""),
    ("jax", "compile"),
    ("jaxlib", "compile"),
    ("flatbuffers", "compile"),
    ("numba", "compile"),
    ("llvmlite", "compile"),
    ("scipy", "compile"),
    ("numba-cuda", "cuda-compile"),
    ("cuda-bindings", "cuda-compile"),
    ("nvidia-nvvm", "cuda-compile"),
    ("nvidia-nvjitlink", "cuda-compile"),
    ("cryptography", "sign"),
    ("starlette", "serve"),
    ("uvicorn", "serve"),
    ("httptools", "serve"),
    ("grpcio", "serve"),
    ("prometheus-client", "serve"),
)
"""Each package with the extra that installs it."""
_LINKERS = {
    "linker": (True, "to compile"),
    "linker for others": (False, "to compile for another architecture than that of this machine"),
}
"""Each linker: is it for this machine, and what needs it."""


def command() -> None:
    """Check this installation, and print the commands that install missing parts.

    A part is ok, optional (not installed, and needed only for the named purpose) or missing. Exit code 1 if a part that
    is needed to run bundles is missing.
    """
    from aotc_cli.shared.tables import print_table

    report, rows = list(_doctor_report()), []
    for level, what, value, fix in report:
        rows.append(({"ok": "ok", "no": "missing", "opt": "optional"}[level], what, value))
        rows += [("", "", f"try: {fix}")] if fix else []
    print_table(("", "", ""), rows)
    if any(level == "no" for level, *_ in report):
        raise typer.Exit(1)


def _doctor_report() -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each component: status (``ok``, ``opt``, ``no``), name, value, remedy."""
    import aotc

    yield "ok", "aotc", f"{aotc.__version__} in {Path(aotc.__file__).parent}", ""
    old = sys.version_info < (3, 11)
    yield "no" if old else "ok", "python", platform.python_version(), "Python 3.11 or newer" if old else ""
    yield from _package_lines()
    yield from _linker_lines()
    yield from _machine_line()
    yield _gpu_line()
    yield _cache_line()
    yield _lapack_line()
    yield _thread_line()


def _package_lines() -> Iterator[tuple[str, str, str, str]]:
    from aotc.vmfb.host.install import install_command  # imports importlib.metadata

    for name, extra in _PACKAGES:
        if version := _package_version(name):
            yield "ok", name, version, ""
        else:
            why = f"not installed (needed {_EXTRAS.get(extra, 'to run bundles')})"
            yield "opt" if extra else "no", name, why, install_command(extra)


def _package_version(package: str) -> str:
    """Return the version of an installed package, or an empty string."""
    from importlib import metadata  # takes 10 ms; all commands import this module

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _linker_lines() -> Iterator[tuple[str, str, str, str]]:
    from aotc.diagnostics import CompileError
    from aotc.kernels.cpu.find_linker import linker_command
    from aotc.vmfb.host.install import install_command

    for what, (native, purpose) in _LINKERS.items():
        try:
            yield "ok", what, linker_command(native)[0], ""
        except CompileError:
            yield "opt", what, f"none (needed {purpose})", install_command("linker")


def _machine_line() -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows about the processor's features and the target for this machine."""
    from aotc.diagnostics import CompileError
    from aotc.targets import host_target
    from aotc.vmfb.host.machine import cpu_features

    have = cpu_features()
    known = ("sse4_2", "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "sve")
    yield "ok", "cpu", f"{platform.machine()}: {' '.join(f for f in known if f in have) or 'features unknown'}", ""
    try:
        target = host_target()
        yield "ok", "target", f"{target.name}, L1 {target.l1 >> 10} KiB, L2 {target.l2 >> 10} KiB", ""
    except CompileError as error:
        yield "opt", "target", error.findings[0].message, "name one with --target, see `aotc targets`"


def _gpu_line() -> tuple[str, str, str, str]:
    driver = Path("/proc/driver/nvidia/version")
    cards = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if driver.exists():
        return "ok", "gpu", f"{len(cards)} NVIDIA, {driver.read_text().splitlines()[0]}", ""
    return "opt", "gpu", "no NVIDIA driver (needed only for CUDA)", "install the NVIDIA driver; --target=cpu needs none"


def _cache_line() -> tuple[str, str, str, str]:
    """Return the row about the kernel cache: its folder and size, or the reason why it is not used."""
    try:
        from aotc.kernels.jobs.store import cache_directory
        from aotc.vmfb.host.files import other_writers
    except ImportError:
        return "opt", "kernel cache", "not used without the compiler", ""
    from aotc_cli.shared.units import size_text

    try:
        path = cache_directory()
    except OSError as error:
        return "opt", "kernel cache", f"not used: {error}", "set AOTC_CACHE_DIR"
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else []
    place = path if path.is_dir() else next(p for p in path.parents if p.is_dir())
    value = f"{path}: {size_text(sum(f.stat().st_size for f in files))} in {len(files)} files"
    another = "set AOTC_CACHE_DIR to a folder of your own"
    if path.exists() and not path.is_dir():
        return "opt", "kernel cache", f"not used: {path} is not a folder", another
    if path.is_dir() and (reason := other_writers(path.stat())):
        return "opt", "kernel cache", f"not used: {path} {reason}", f"chmod go-w it if all in it is yours, or {another}"
    if os.access(place, os.W_OK):
        return "ok", "kernel cache", value, ""
    return "opt", "kernel cache", f"not used: {place} cannot be written to", another


def _lapack_line() -> tuple[str, str, str, str]:
    from aotc.vmfb.host.lapack import lapack_install_command, library_candidates

    found = next(map(str, library_candidates()), "")
    if found:
        return "ok", "lapack", found, ""
    return "opt", "lapack", "none (needed by models that factor matrices)", lapack_install_command()


def _thread_line() -> tuple[str, str, str, str]:
    """Return the row about the number of threads and the limits that determine it."""
    from aotc.vmfb.errors import CallError
    from aotc.vmfb.host.machine import cgroup_quota, thread_count

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup_quota("/sys/fs/cgroup")
    reasons = [f"{os.cpu_count()} cores", f"affinity {affinity}", f"cgroup {quota:g}" if quota else "no cgroup limit"]
    reasons += [f"{name}={os.environ[name]}" for name in ("AOTC_NUM_THREADS", "OMP_NUM_THREADS") if name in os.environ]
    try:
        return "ok", "threads", f"{thread_count(None)} ({', '.join(reasons)})", ""
    except CallError as error:
        problem = f"{str(error).splitlines()[0]} (AOTC_NUM_THREADS={os.environ['AOTC_NUM_THREADS'][:40]})"
        return "no", "threads", problem, "unset AOTC_NUM_THREADS, or set it to a number"
