"""Bundles whose data was changed and whose sums were made again: an error of ours, or a call that comes back.

Machine code is left alone: nobody can check it. So a crash or a hang is a failure. One kind of hang is not: a loop
of the model, also one inside a kernel, runs for as long as its condition says, and what that reads can be changed. But
Ctrl-C has to end it.
"""

from __future__ import annotations

import os
import random
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from aotc.source.restore import restore_source
from aotc.vmfb.abi import WhileNode
from aotc.vmfb.bundle import _HEADER, MAGIC, VERSION, _align_offset, open_bundle
from aotc.vmfb.commands import all_nodes, decode_commands
from aotc.vmfb.describe import describe_bundle
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.host.digests import sha256_of
from aotc.vmfb.module import load
from aotc.vmfb.verify.check_bundle import check_bundle

GOLDEN = Path(__file__).parents[1] / "golden_bundles"
NUMBERS = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 4096, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 47, 1 << 61,
    (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -64, -(1 << 40), -(1 << 63),
)  # fmt: skip
TEXTS = ("", "main", "f32", "i1", "c128", "bf16", "cpu", "cuda", "cuda:sm_90", "n", "\0", "x" * 300, "dgetrf", "leaf")
PATIENCE = 30.0  # seconds: a call takes thousandths, the first one imports modules on a busy machine
CODE = ("executor", "library", "cubin", "ptx")
FEW = ("prepared", "parts", "spaces", "devices", "targets", "transfers", "specialized", "constants", "custom_calls")
CUSTOM = {"golden_counts": lambda x, out: out.fill(len(x))}
WORDS = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class Source:
    """A bundle to start from: its manifest, segments, and arguments of one call of each function."""

    name: str
    manifest: dict[str, Any]
    segments: list[bytes]
    arguments: dict[str, list[np.ndarray]]


@cache
def sources() -> list[Source]:
    """Return all golden bundles."""
    found = []
    for path in sorted(GOLDEN.glob("*.vmfb")):
        opened = open_bundle(path.read_bytes())
        segments = [bytes(opened.segment(n)) for n in range(len(opened.manifest["segments"]))]
        found.append(Source(path.stem, opened.manifest, segments, arguments_of(path, opened.manifest)))
    return found


def arguments_of(path: Path, manifest: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Return the arguments of the first call of each function, of the types that its signature has."""
    with np.load(path.with_suffix(".npz")) as file:
        stored = {key if "/" in key else f"main/0/{key}": file[key] for key in file.files}
    found = {}
    for name, function in manifest["functions"].items():
        arrays = [stored[key] for n in range(len(stored)) if (key := f"{name}/0/a{n}") in stored]
        dtypes = [to_numpy(row["dtype"]) for row in function["arguments"]]
        if len(arrays) == len(dtypes):  # bundles with weights of their own, or a state, store the others alone
            arrays = [x if x.dtype == dtype else x.view(dtype) for x, dtype in zip(arrays, dtypes)]
        found[name] = arrays
    return found


def repack(manifest: dict[str, Any], names: list[str], segments: list[bytes], rng: random.Random) -> bytes:
    """Return a bundle with right sums; seldom with a table of segments that does not fit."""
    table: list[dict[str, Any]] = []
    payload = b""
    for name, data in zip(names, segments):
        table.append({"name": name, "offset": len(payload), "size": len(data), "sha256": sha256_of(data)})
        payload += data + bytes(-len(data) % 64)
    if rng.random() < 0.02:
        change_row(rng.choice(table), rng)
    packed = msgpack.packb({**manifest, "segments": table})
    total = _HEADER.size + _align_offset(len(packed)) + len(payload)
    header = _HEADER.pack(MAGIC, VERSION, 0, len(packed), sha256_of(packed), total)
    return header + packed + bytes(_align_offset(len(packed)) - len(packed)) + payload


def change_row(row: dict[str, Any], rng: random.Random) -> None:
    """Change the row of a segment in their table."""
    key = rng.choice(("offset", "size", "offset", "size", "sha256", "name"))
    row[key] = rng.choice(NUMBERS) if key in ("offset", "size") else changed(row[key], rng)


def change_file(data: bytes, rng: random.Random) -> bytes:
    """Return a file that is cut, lengthened, or has other numbers in its header; its sums are not made again."""
    match rng.randrange(4):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            return data + rng.randbytes(rng.choice((1, 63, 64, 128, 999)))
        case 2:
            fields = list(_HEADER.unpack_from(data))
            at = rng.choice([n for n, field in enumerate(fields) if isinstance(field, int)])
            fields[at] = rng.choice((fields[at] + 1, fields[at] - 1, 0, 1, 2, 64, 1 << 31, (1 << 32) - 1)) % (1 << 32)
            return _HEADER.pack(*fields) + data[_HEADER.size :]
    found = bytearray(data)
    for _ in range(rng.randrange(1, 5)):  # of the header and the manifest
        found[rng.randrange(min(len(found), 3000))] ^= rng.randrange(1, 256)
    return bytes(found)


def mutant(number: int) -> tuple[bytes, Source, bool]:
    """Return a bundle, what it was made of, and whether it has a loop."""
    rng = random.Random(number)
    source = rng.choice(sources())
    manifest = msgpack.unpackb(msgpack.packb(source.manifest), strict_map_key=False)
    segments = list(source.segments)
    variants = manifest["variants"]
    words = [row["code"] for variant in variants for row in variant["command_buffers"]]
    kernels = [kernel["name"] for variant in variants for kernel in variant["kernels"]]
    loops = any(has_loop(segments[n]) for n in words) or any("_loop_" in name for name in kernels)
    parts = [part for variant in variants for part in (variant, *variant.get("parts", ()))]
    frozen = {part[key] for part in parts for key in CODE if part.get(key) is not None}
    libraries = [part["library"] for part in parts if part.get("library") is not None]
    if rng.random() < 0.05:
        names = [row["name"] for row in source.manifest["segments"]]
        return change_file(repack(manifest, names, segments, rng), rng), source, loops
    roots = [manifest, manifest["functions"], *variants, *(variant["functions"] for variant in variants)]
    few = [variant[key] for variant in variants for key in FEW if variant.get(key)]
    few += [manifest[key] for key in ("weights", "symbols") if manifest.get(key)]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        kind = rng.random()
        if kind < 0.1 and few:
            change_manifest(rng.choice(few), rng)
        elif kind < 0.45:
            change_manifest(rng.choice(roots), rng)
        elif kind < 0.9 and words:
            change_words(segments, rng.choice(words), rng)
        else:
            change_segments(segments, frozen, rng)
    if rng.random() < 0.1:
        change_source(manifest, segments, rng)
    if libraries and rng.random() < 0.05:  # another bundle's code, whole
        other = rng.choice(sources())
        theirs = [v["library"] for v in other.manifest["variants"] if v.get("library") is not None]
        if theirs:
            segments[rng.choice(libraries)] = other.segments[rng.choice(theirs)]
    return repack(manifest, [row["name"] for row in source.manifest["segments"]], segments, rng), source, loops


def input_of(number: int) -> tuple[bytes, str]:
    """Return the changed bundle of a case."""
    return mutant(number)[0], ".vmfb"


def has_loop(code: bytes) -> bool:
    """Tell whether a command buffer holds a loop."""
    return any(isinstance(node, WhileNode) for node in all_nodes(decode_commands(np.frombuffer(code, "<i8").tolist())))


def dtype_of(value: dict[str, Any]) -> np.dtype:
    """Return NumPy's type of a value of a signature."""
    return to_numpy(value["dtype"])


def change_manifest(here: Any, rng: random.Random) -> None:
    """Change, drop, repeat or move one value somewhere in a part of the manifest."""
    while True:
        inner = list(here.values() if isinstance(here, dict) else here)
        deeper = [x for x in inner if isinstance(x, dict | list) and x]
        if not deeper or rng.random() < 0.12:
            break
        here = rng.choice(deeper)
    if not here:
        return
    keys = list(here) if isinstance(here, dict) else list(range(len(here)))
    key = rng.choice([k for k in keys if k not in ("segments", "executor", "library")] or keys)
    action = rng.random()
    if action < 0.7:
        here[key] = changed(here[key], rng)
    elif action < 0.8:
        del here[key]
    elif action < 0.9 and isinstance(here, list):
        here.insert(key, here[rng.randrange(len(here))])
    else:
        here[key], other = here[(swap := rng.choice(keys))], here[key]
        here[swap] = other


def changed(value: Any, rng: random.Random) -> Any:
    """Return another value, mostly of the same type."""
    if rng.random() < 0.08:
        return rng.choice((None, True, 0, -1, "", [], {}, b"x", 1.5, [[1]], {"a": 1}))
    match value:
        case bool():
            return not value
        case int():
            near = value + rng.choice((-64, -8, -1, 1, 2, 8, 64))
            found = rng.choice((near, near, near, value * 2, value // 2, -value, rng.choice(NUMBERS), rng.randrange(8)))
            return found if -(1 << 63) <= found < 1 << 64 else 0
        case str():
            return rng.choice((*TEXTS, value[1:], value + "x", value.upper()))
        case list() if value and rng.random() < 0.5:
            return [*value[:-1], changed(value[-1], rng)]
        case dict() if value and rng.random() < 0.5:
            key = rng.choice(list(value))
            return {**value, key: changed(value[key], rng)}
    return rng.choice((value, None, []))


def change_words(segments: list[bytes], number: int, rng: random.Random) -> None:
    """Change some words of a command buffer."""
    words = np.frombuffer(segments[number][: len(segments[number]) // 8 * 8], "<i8").tolist()
    if not words:
        return
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(words))
        value = words[at]
        match rng.randrange(6):
            case 0:
                value = rng.choice(NUMBERS) * rng.choice((1, 2))
            case 1 | 2:
                value += rng.choice((-128, -2, -1, 1, 2, 4, 128))
            case 3:
                value = rng.choice(words)
            case 4:
                words.insert(at, value)
            case 5 if len(words) > 1:
                del words[at]
                continue
        words[at] = value if value in WORDS else 0
    segments[number] = np.array(words, "<i8").tobytes()[: rng.choice((None, None, None, None, -8, -3))]


def change_segments(segments: list[bytes], frozen: set[int], rng: random.Random) -> None:
    """Cut, lengthen or overwrite a segment that holds no machine code."""
    free = [n for n in range(len(segments)) if n not in frozen]
    if not free:
        return
    number = rng.choice(free)
    data = bytearray(segments[number])
    match rng.randrange(3):
        case 0:
            data = data[: rng.randrange(len(data) + 1)]
        case 1:
            data += bytes(rng.randrange(200))
        case 2 if data:
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(len(data))] = rng.randrange(256)
    segments[number] = bytes(data)


def change_source(manifest: dict[str, Any], segments: list[bytes], rng: random.Random) -> None:
    """Change what the source of a bundle says, and make its sums again."""
    entry = manifest.get("source")
    number = entry.get("segment") if isinstance(entry, dict) else None
    if not isinstance(number, int) or not 0 <= number < len(segments):
        return
    try:
        record = msgpack.unpackb(zlib.decompress(segments[number]), strict_map_key=False)
    except zlib.error:  # it was changed already
        return
    for _ in range(rng.choice((1, 1, 2, 4))):
        change_manifest(record, rng)
    packed = msgpack.packb(record)
    segments[number], entry["bytes"] = zlib.compress(packed), len(packed)


def arguments_for(module: Any, name: str, given: list[np.ndarray]) -> list[np.ndarray]:
    """Return arrays that fit the signature as it is now, where that is within reason, else those of before."""
    made = []
    for n, argument in enumerate(module.functions[name].signature.arguments):
        shape = [d if isinstance(d, int) else 3 for d in argument["dims"]]
        fits = n < len(given) and given[n].dtype == dtype_of(argument) and list(given[n].shape) == shape
        small = all(d < 1000 for d in shape) and int(np.prod(shape)) < 10**6
        usable = fits or not small
        made.append(given[n % len(given)] if usable and given else np.ones(shape if small else 1, dtype_of(argument)))
    return made


def case(number: int) -> str:
    """Describe, check, load and call one mutant, and read its source."""
    data, source, loops = mutant(number)
    os.environ["AOTC_WEIGHTS_PATH"] = str(GOLDEN)  # files of weights
    with suppress(BundleError):
        opened = open_bundle(data)
        describe_bundle(opened, len(data))
    with suppress(BundleError):
        restore_source(open_bundle(data))
    with suppress(BundleError):
        check_bundle(data)
    try:
        module = load(data, threads=1 + number % 2, verify=number % 3 == 0, custom_calls=CUSTOM)
        repr(module)
        module.stats()
        return calls(module, source, loops)
    except BundleError as error:
        if "this is a bug in aotc" in str(error):  # a check is missing
            raise
        return "BundleError"
    except CallError:
        return "CallError"


def calls(module: Any, source: Source, loops: bool) -> str:
    """Call every function with arguments that fit and with those of before."""
    for name in module.functions:
        before = source.arguments.get(name) or next(iter(source.arguments.values()))
        for arguments in (arguments_for(module, name, before), before):
            try:
                module.invoke(name, *arguments)
            except KeyboardInterrupt:
                if loops:
                    return "a loop of the model, which Ctrl-C ended"
                raise
    return "runs, with a loop" if loops else "runs"
