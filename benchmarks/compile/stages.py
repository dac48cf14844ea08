"""Processor time of each stage of a compilation, in this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.compile.processes import processor_time


@contextmanager
def stages(found: dict[str, float]) -> Iterator[None]:
    """Add to ``found`` the processor time in seconds of each stage of compilations in the ``with`` block."""
    from aotc import pipeline
    from aotc.frontend import importer, mlir
    from aotc.kernels import worker
    from aotc.kernels.back_end import Library
    from aotc.kernels.cpu import compile as cpu
    from aotc.kernels.cpu import link
    from aotc.kernels.jobs import objects, run

    kept: list[tuple[Any, str, Any]] = []
    inside: list[float] = []

    def watch(where: Any, name: str, stage: str) -> None:
        plain = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = processor_time()
            inside.append(0.0)
            try:
                return plain(*args, **kwargs)
            finally:
                whole = processor_time() - begin
                found[stage] = found.get(stage, 0.0) + whole - inside.pop()
                if inside:
                    inside[-1] += whole

        kept.append((where, name, plain))
        setattr(where, name, call)

    for where, name, stage in (
        (mlir, "fetch", "fetch"), (importer, "import_raw", "parse"), (pipeline, "run_passes", "passes"),
        (pipeline, "lower", "lowering"), (pipeline, "assemble", "bundle"), (worker, "parse_kernel", "emit"),
        (cpu, "emit_kernel", "emit"), (Library, "simplify", "LLVM passes"), (Library, "optimize", "LLVM passes"),
        (Library, "inline_late", "LLVM passes"), (Library, "emit_native_object", "code"),
        (link.Linker, "linked_library", "link"), (link, "function_table_object", "link"),
        (pipeline, "embed_source", "bundle"), (pipeline, "check_bundle", "bundle"),
        (objects, "name_kernels", "lowering"),
    ):  # fmt: skip
        watch(where, name, stage)
    waiting: Any = run.WaitingRequests
    kept += [(waiting, "worker_counts", waiting.worker_counts), (run, "OWN_TEXT", run.OWN_TEXT)]
    waiting.worker_counts, run.OWN_TEXT = (lambda *_: (0, 1)), run.LONGEST_TEXT - 1
    try:
        yield
    finally:
        for where, name, plain in reversed(kept):
            setattr(where, name, plain)
