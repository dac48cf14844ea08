"""Bundles whose data was changed and whose sums were made again: an error of ours, or a call that comes back.

Machine code is left alone: nobody can check it. So a crash or a hang is a failure. One kind of hang is not: a loop
of the model, also one inside a kernel, runs for as long as its condition says, and what that reads can be changed. But
Ctrl-C has to end it.
"""

from __future__ import annotations

import random
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from aotc.source.restore import restore
from aotc.vmfb.abi import WhileNode
from aotc.vmfb.bundle import _HEADER, MAGIC, VERSION, _align, open_bundle
from aotc.vmfb.commands import all_nodes, read_commands
from aotc.vmfb.devices import cpu
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError, VmError
from aotc.vmfb.module import load
from aotc.vmfb.process.digests import sha256_of

GOLDEN = Path(__file__).parents[1] / "golden_bundles"
NUMBERS = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 4096, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 47, 1 << 61,
    (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -64, -(1 << 40), -(1 << 63),
)  # fmt: skip
TEXTS = ("", "main", "f32", "i1", "c128", "bf16", "cpu", "cuda", "cuda:sm_90", "n", "\0", "x" * 300, "dgetrf", "leaf")
PATIENCE = 4.0  # seconds: a call takes thousandths
CODE = ("executor", "library", "cubin")
WORDS = range(-(1 << 63), 1 << 63)


@cache
def sources() -> list[tuple[str, dict[str, Any], list[bytes], list[np.ndarray]]]:
    """Name, manifest, segments and arguments of each bundle to start from."""
    found = []
    for path in sorted(GOLDEN.glob("*.vmfb")):
        opened = open_bundle(path.read_bytes())
        (variant, *others), own = opened.manifest["variants"], opened.manifest.get("weights")
        if others or own or variant["kind"] != "cpu" or cpu.obstacle(variant) or variant.get("custom_calls"):
            continue
        segments = [bytes(opened.segment(n)) for n in range(len(opened.manifest["segments"]))]
        with np.load(path.with_suffix(".npz")) as held:
            arguments = [held[name] for name in sorted(held.files) if name.startswith("a")]
        found.append((path.stem, opened.manifest, segments, arguments))
    return found


def repack(manifest: dict[str, Any], names: list[str], segments: list[bytes], rng: random.Random) -> bytes:
    """Return a bundle with right sums; seldom with a table of segments that does not fit."""
    table: list[dict[str, Any]] = []
    payload = b""
    for name, data in zip(names, segments):
        table.append({"name": name, "offset": len(payload), "size": len(data), "sha256": sha256_of(data)})
        payload += data + bytes(-len(data) % 64)
    if rng.random() < 0.02:
        table[rng.randrange(len(table))][rng.choice(("offset", "size"))] = rng.choice(NUMBERS)
    packed = msgpack.packb({**manifest, "segments": table})
    total = _HEADER.size + _align(len(packed)) + len(payload)
    header = _HEADER.pack(MAGIC, VERSION, 0, len(packed), sha256_of(packed), total)
    return header + packed + bytes(_align(len(packed)) - len(packed)) + payload


def mutant(number: int) -> tuple[bytes, list[np.ndarray], bool]:
    """Return a bundle, arguments for it, and whether it has a loop."""
    rng = random.Random(number)
    _, first, segments, arguments = rng.choice(sources())
    manifest = msgpack.unpackb(msgpack.packb(first), strict_map_key=False)
    segments = list(segments)
    (variant,) = manifest["variants"]
    words = [row["code"] for row in variant["command_buffers"]]
    loops = any(has_loop(segments[n]) for n in words) or any("_loop_" in k["name"] for k in variant["kernels"])
    frozen = {variant[key] for key in CODE if key in variant}
    library = variant["library"]
    roots = [manifest["functions"], variant, variant["functions"], manifest]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        kind = rng.random()
        if kind < 0.45:
            change_manifest(rng.choice(roots), rng)
        elif kind < 0.9:
            change_words(segments, rng.choice(words), rng)
        else:
            change_segments(segments, frozen, rng)
    if rng.random() < 0.1:
        change_source(manifest, segments, rng)
    if rng.random() < 0.05:  # another bundle's code, whole
        _, other, theirs, _ = rng.choice(sources())
        segments[library] = theirs[other["variants"][0]["library"]]
    return repack(manifest, [row["name"] for row in first["segments"]], segments, rng), arguments, loops


def has_loop(code: bytes) -> bool:
    """Tell whether a command buffer holds a loop."""
    return any(isinstance(node, WhileNode) for node in all_nodes(read_commands(np.frombuffer(code, "<i8").tolist())))


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
        fits = n < len(given) and given[n].dtype == to_numpy(argument["dtype"]) and list(given[n].shape) == shape
        small = all(d < 1000 for d in shape) and int(np.prod(shape)) < 10**6
        made.append(np.ones(shape, to_numpy(argument["dtype"])) if small and not fits else given[n % len(given)])
    return made


def case(number: int) -> str:
    """Load and call one mutant, and read its source."""
    data, arguments, loops = mutant(number)
    with suppress(BundleError):
        restore(open_bundle(data))
    try:
        module = load(data, threads=1 + number % 2, verify=number % 3 == 0)
        repr(module)
        module.stats()
        return calls(module, arguments, loops)
    except BundleError:
        return "BundleError"
    except VmError:
        return "VmError"


def calls(module: Any, arguments: list[np.ndarray], loops: bool) -> str:
    """Call every function with arguments that fit and with those of before."""
    for name in module.functions:
        for given in (arguments_for(module, name, arguments), arguments):
            try:
                module.invoke(name, *given)
            except KeyboardInterrupt:
                if loops:
                    return "a loop of the model, which Ctrl-C ended"
                raise
    return "runs, with a loop" if loops else "runs"
