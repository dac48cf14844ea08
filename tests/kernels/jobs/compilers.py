"""Requests to compilers, answered as a library's are."""

from aotc.kernels.cpu.build import LibraryBuild
from aotc.kernels.jobs.run import THREAD_TEXT, CompilerRun, do_nothing
from aotc.kernels.worker import target_fields
from aotc.targets import host_target

SINES = """def sines{n}(a: "f32[1024]", /, o: "f32[1024]", *, grid: "1", flops: "8", bytes: "64"):
    for i in range(0, 1024):
        o[i] = sin(a[i]) + a[{n}]
"""
PADDED = f"    # {'x' * THREAD_TEXT}\n"
TEXTS = [SINES.format(n=n) + PADDED for n in range(8)]


def quiet(count):
    """Progress that nobody watches."""


def answers(pool, requests, jobs, done=quiet, begin=None, meanwhile=do_nothing):
    """Return the objects of ``requests``."""
    with CompilerRun(pool, requests, jobs, begin) as run:
        return run.finish(done, meanwhile)


def requests(texts=TEXTS, target=None):
    """Return requests for kernels."""
    return [{"text": text, "target": target_fields(target or host_target())} for text in texts]


def build_library(kernels, target, options):
    """Return a library of kernels that nobody has begun before."""
    with LibraryBuild(kernels, target, options) as build:
        return build.finish()
