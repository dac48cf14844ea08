"""Changed safetensors files as a bundle's own weights, its constants, and weights that a caller gives."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import aotc
from aotc.vmfb.errors import BundleError, CallError

PATIENCE = 10.0  # seconds: a case takes hundredths
GOLDEN = Path(__file__).parents[1] / "golden_bundles"
NUMBERS = (-1, 0, 1, 7, 8, 255, 1 << 31, 1 << 32, 1 << 53, 1 << 63, (1 << 64) - 1, 1 << 70, 1.5, None, "8", [], {})
WORDS = ("F32", "F16", "BF16", "U8", "I64", "BOOL", "F8_E4M3", "f32", "", "\0", "__metadata__", "params/w", "x" * 5000)


@cache
def folder() -> Path:
    """A folder with the bundles whose files change."""
    made = Path(tempfile.mkdtemp(prefix="aotc-fuzz-"))
    for name in ("own_file", "external"):
        (made / f"{name}.vmfb").write_bytes((GOLDEN / f"{name}.vmfb").read_bytes())
    return made


def input_of(number: int) -> tuple[bytes, str]:
    """Return the changed file of a case."""
    rng = random.Random(number)
    data = (GOLDEN / f"{name_of(number)}.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    raw = rng.random() < 0.3
    if not raw:
        for _ in range(rng.choice((1, 1, 2, 3))):
            change_header(header, rng)
        if rng.random() < 0.2:
            values = values[: rng.randrange(len(values) + 1)] if rng.random() < 0.5 else values + rng.randbytes(16)
        text = json.dumps(header, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
        data = struct.pack("<Q", len(text)) + text + values
    if raw or rng.random() < 0.1:
        data = change_bytes(bytearray(data), rng)
    return data, ".safetensors"


def name_of(number: int) -> str:
    """Return which bundle's file a case changes."""
    return ("own_file", "external")[number % 2]


def change_header(header: dict[str, Any], rng: random.Random) -> None:
    """Change one field of one tensor, or the set of tensors."""
    if not header:
        return
    name = rng.choice(list(header))
    row = header[name]
    match rng.randrange(6):
        case 0:
            header[rng.choice(WORDS)] = header.pop(name)
        case 1:
            header[name] = rng.choice((*NUMBERS, *WORDS))
        case 2:
            header[rng.choice(WORDS) + "2"] = row
        case _ if isinstance(row, dict) and row:
            key = rng.choice(list(row))
            value = row[key]
            if isinstance(value, list) and value and rng.random() < 0.7:
                at = rng.randrange(len(value))
                near = value[at] + rng.choice((-4, -1, 1, 4)) if isinstance(value[at], int) else 0
                value[at] = rng.choice((near, *NUMBERS))
            elif rng.random() < 0.2:
                del row[key]
            else:
                row[key] = rng.choice((*NUMBERS, *WORDS))


def change_bytes(data: bytearray, rng: random.Random) -> bytes:
    """Cut, lengthen or overwrite a file; half of the time in its length and header."""
    match rng.randrange(4):
        case 0:
            return bytes(data[: rng.randrange(len(data) + 1)])
        case 1:
            return bytes(data + rng.randbytes(rng.randrange(1, 99)))
        case 2:
            lengths = (0, 1, 2, len(data), len(data) - 8, 1 << 31, 1 << 40, (1 << 64) - 1)
            data[:8] = struct.pack("<Q", rng.choice(lengths))
        case 3:
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(min(len(data), 300) if rng.random() < 0.5 else len(data))] = rng.randrange(256)
    return bytes(data)


def case(number: int) -> str:
    """Load a bundle with one changed file, and call it; give the file as the weights of another load."""
    name, (data, _) = name_of(number), input_of(number)
    (folder() / f"{name}.safetensors").write_bytes(data)
    words = []
    for options in ({}, {"weights": str(folder() / f"{name}.safetensors")}):
        try:
            module = aotc.load(folder() / f"{name}.vmfb", threads=1, verify=number % 3 == 0, **options)
            module.invoke("main", *(np.ones(a["dims"], "f4") for a in module.main.signature.arguments))
            words.append("runs")
        except (BundleError, CallError) as error:
            words.append(type(error).__name__)
    return ", ".join(words)
