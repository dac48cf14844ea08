"""Does a change of the compiler change what it makes? Freeze before, compare after.

    python tests/support/frozen.py corpus FOLDER             # the benchmark's models and random programs, once
    python tests/support/frozen.py freeze FOLDER             # before the change
    python tests/support/frozen.py compare FOLDER            # after it; names what differs, and exits with 1
    python tests/support/frozen.py compare FOLDER --bundles  # bytes of all bundles (slow; freeze --bundles before)

Each model is compiled at its levels for each of :data:`TARGETS` into a bundle whose machine code is the LLVM IR before
optimisation: so kernel texts, host programs, command buffers, constants, signatures and IR are compared, piece by
piece, without the time that LLVM takes. The real bytes of the bundles of :data:`WHOLE` models and of the random
programs are compared as well. The cache is an empty folder, for it would answer with what the old code made.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgpack

ROOT = Path(__file__).parents[2]
TARGETS = ("cpu:x86-64-v3", "cpu:x86-64-v4", "cuda:sm_90")
LEVELS = (0, 1, 2, 3)
WHOLE = ("tiny_add", "mlp_dynbatch", "diffrax_lorenz")
PROGRAMS = 40
Pieces = dict[str, str]  # what a bundle is made of, and a digest of each


# ---------------------------------------------------------------- the corpus


def write_programs(folder: Path) -> None:
    """Write :data:`PROGRAMS` random programs, every fourth of symbolic sizes."""
    import jax
    from hypothesis import HealthCheck, Phase, given, settings
    from jax import export

    from support.programs import programs

    quiet = settings(
        derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HealthCheck
    )

    def write(name: str, symbolic: bool, count: int) -> None:
        numbers = iter(range(count))

        @settings(quiet, max_examples=count)
        @given(programs(symbolic=symbolic, most=10))
        def one(program: Any) -> None:
            number = next(numbers, None)
            if number is not None:
                with jax.enable_x64(True):
                    exported = export.export(jax.jit(program.function()))(*program.types())
                (folder / f"{name}{number:02}.jaxexp").write_bytes(exported.serialize())

        one()

    write("static", False, PROGRAMS - PROGRAMS // 4)
    write("symbolic", True, PROGRAMS // 4)


def write_model(folder: Path, name: str) -> None:
    """Write one of the benchmark's models."""
    import jax

    from benchmarks.programs.models import MODELS

    model = MODELS[name]()
    specs = jax.export.symbolic_args_specs(model.inputs, model.specs or ("...",) * len(model.inputs))
    exported = jax.export.export(jax.jit(model.function), platforms=("cpu",))(*specs)
    (folder / f"{name}.jaxexp").write_bytes(exported.serialize())


def write_corpus(folder: Path) -> None:
    """Write all inputs, each model in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    write_programs(folder)
    sys.path.append(str(ROOT))
    from benchmarks.programs.models import MODELS

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in MODELS:
        command = [sys.executable, __file__, "model", str(folder), name]
        if subprocess.run(command, env=environment, check=False).returncode:
            print(f"{name}: left out, its library is missing", file=sys.stderr)


# ---------------------------------------------------------------- what is compared


def code_is_ir() -> None:
    """Replace machine code by LLVM IR before optimisation in the bundles that this process compiles."""
    from aotc.kernels.cpu import build, link
    from aotc.kernels.cuda import build as cuda_build

    known: dict[tuple[str, str], bytes] = {}

    def compile_texts(requests: list[dict[str, Any]], named: list[Any], options: Any) -> list[bytes]:
        for request, (text, target, *_) in zip(requests, named, strict=True):
            if (text, target.name) not in known:
                known[text, target.name] = unoptimised(text, target) if "text" in request else text.encode()
        return [known[text, target.name] for text, target, *_ in named]

    cuda_build.compile_texts = compile_texts
    build.Compilation.begin_ahead = lambda self: None
    build.Compilation.finish = lambda self, meanwhile: compile_texts(*self.given)
    build.Compilation.write_to_cache = lambda self: None
    link.Linker.send_objects = lambda self, objects: setattr(self, "given", objects)
    link.Linker.linked_library = lambda self, allowed=(): packed_digests(self.given)


def packed_digests(objects: list[bytes]) -> bytes:
    """Pack the digests of objects in place of the library that they would be linked to."""
    return msgpack.packb([hashlib.sha256(data).digest() for data in objects])


def unoptimised(text: str, target: Any) -> bytes:
    """Return the LLVM IR of a kernel's body as it is emitted."""
    from aotc.ir.loop.parser import parse_kernel
    from aotc.kernels.cpu.tiles.tile import emit_tile
    from aotc.kernels.emit.body import emit_body
    from aotc.kernels.llvm_types import KernelModule
    from aotc.kernels.symbol_table import TextModule

    kernel = parse_kernel(text)
    if target.kind == "cuda":
        from aotc.kernels.cuda.compile import kernel_body_text
        from aotc.kernels.cuda.image import Image

        return Image(kernel_body_text(kernel, target).encode()).packed()
    module = KernelModule("kernel", target)
    module.finished = finished = TextModule(module.triple, module.data_layout)
    emit_body(module, "body", kernel, target, emit_tile)
    return f"{module}{finished}".encode()


def digest(data: Any) -> str:
    """Return a digest of bytes, or of a manifest's value."""
    raw = data if isinstance(data, bytes | memoryview) else msgpack.packb(data)
    return hashlib.sha256(raw).hexdigest()[:24]


def pieces_of(data: bytes) -> Pieces:
    """Return the digest of each piece of a bundle."""
    from aotc.vmfb.bundle import open_bundle

    bundle = open_bundle(data)
    manifest = dict(bundle.manifest)
    pieces = {f"segment {s['name']}": digest(s["sha256"]) for s in manifest.pop("segments")}
    for name, entry in manifest.pop("debug")["kernels"].items():
        pieces[f"kernel {name}"] = digest(entry)
    for v in manifest.pop("variants"):
        pieces |= {f"{v['target']} {key}": digest(value) for key, value in v.items()}
    return pieces | {f"manifest {key}": digest(value) for key, value in manifest.items()}


def frozen(path: Path, level: int, bundles: bool, targets: tuple[str, ...] = TARGETS) -> Pieces:
    """Compile a model and return the digests of its pieces; with ``bundles`` those of the real bundle."""
    import aotc
    from aotc.diagnostics import CompileError

    if not bundles:
        code_is_ir()
    try:
        data = aotc.compile(path, opt_level=level, target=",".join(targets), cache=bundles, jobs=1)
    except CompileError as error:
        if len(targets) == 1:
            return {f"{targets[0]} refused": digest(str(error).encode())}
        apart = [frozen(path, level, bundles, (target,)) for target in targets]  # one may refuse what others take
        return {f"{t} alone: {piece}": d for t, pieces in zip(targets, apart) for piece, d in pieces.items()}
    return {"bytes": digest(data)} if bundles else pieces_of(data)


# ---------------------------------------------------------------- all of it


def work(folder: Path, everything: bool) -> Iterator[tuple[str, Path, int, bool, tuple[str, ...]]]:
    """Yield the compilations, the largest first: name, path, level, True for machine code, targets."""
    for path in sorted(folder.glob("*.jaxexp"), key=lambda p: -p.stat().st_size):
        random = path.stem[-1].isdecimal() and path.stem.startswith(("static", "symbolic"))
        for level in LEVELS:
            yield f"{path.stem} -O{level}", path, level, False, TARGETS
        if everything:
            for level in LEVELS:
                yield f"{path.stem} -O{level} bundle", path, level, True, TARGETS
        elif random or path.stem in WHOLE:
            yield f"{path.stem} -O2 {TARGETS[1]} bundle", path, 2, True, TARGETS[1:2]


def all_pieces(folder: Path, everything: bool) -> dict[str, Pieces]:
    """Compile the corpus on all cores, with an empty cache at the start."""
    rows = list(work(folder, everything))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["AOTC_CACHE_DIR"] = cache
        found: dict[str, Pieces] = {}
        for bundles in (False, True):
            some = [row for row in rows if row[3] == bundles]
            with ProcessPoolExecutor() as pool:
                made = pool.map(frozen, *zip(*[row[1:] for row in some]))
                for row, pieces in zip(some, made, strict=True):
                    found[row[0]] = pieces
    return found


def differences(before: Mapping[str, Pieces], after: Mapping[str, Pieces]) -> list[str]:
    """Return a line for each piece that differs."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, {}), after.get(name, {})
        lines += [f"{name}: {piece}" for piece in dict.fromkeys([*old, *new]) if old.get(piece) != new.get(piece)]
    return lines


def main() -> int:
    """Run one of the commands of this file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("corpus", "model", "freeze", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--bundles", action="store_true", help="bytes of the bundles of all models at all levels")
    chosen = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    if chosen.command == "corpus":
        write_corpus(chosen.folder)
        return 0
    if chosen.command == "model":
        write_model(chosen.folder, chosen.name)
        return 0
    pieces = all_pieces(chosen.folder, chosen.bundles)
    record = chosen.folder / ("bundles.msgpack" if chosen.bundles else "frozen.msgpack")
    if chosen.command == "freeze":
        record.write_bytes(msgpack.packb(pieces))
        print(f"{len(pieces)} compilations, {sum(map(len, pieces.values()))} pieces")
        return 0
    lines = differences(msgpack.unpackb(record.read_bytes()), pieces)
    print("\n".join(lines[:200]) or f"{len(pieces)} compilations are the same")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
