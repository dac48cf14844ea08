"""Schema of a bundle's manifest, as data in the language of :mod:`aotc.vmfb.verify.schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotc.vmfb.verify.schema import ANY, NONE, problems, schema_acceptor

_VALUE = {
    "name": str, "dtype": str, "dims": [(int, str)], "device?": str, "layout?": [[str]], "whole?": [int]
}  # fmt: skip

_EXTERNAL = {
    "file": str,
    "size": int,
    "tensors": [{"name": str, "dtype": str, "shape": [int], "offset": int, "size": int, "sha256": (bytes, str)}],
}

_COMPRESSED = {"segment": int, "size": int, "rows": [[int]]}

_CODE = {
    "target": str,
    "kind": str,
    "features": [str],
    "commands_version": int,
    "executor_version?": int,
    "executor?": (int, NONE),
    "library?": (int, NONE),
    "imports?": {str: [str]},
    "custom_calls?": [
        {
            "symbol": str,
            "name": str,
            "operands": [[ANY]],
            "results": [[ANY]],
            "attributes": {str: ANY},
            "answers?": bool,
        }
    ],
    "cubin?": int,
    "ptx?": int,
    "driver?": [int],
}

_LAUNCH = {
    "blocks": [(int, list)],
    "resident": int,
    "cluster": [int],
    "shared": int,
    "cooperative?": bool,
    "maps": [
        {
            "buffer": int,
            "type": str,
            "sizes": [(int, list)],
            "strides": [(int, list)],
            "box": [int],
            "swizzle": int,
            "window?": {"low": [int], "pixels": [int], "strides": [int]},
        }
    ],
}

_HALF = {
    "name": str,
    "arguments": [{**_VALUE, "donated": bool}],
    "results": [{**_VALUE, "sources?": [int], "value?": int}],
    "registers": int,
    "code": [[ANY]],
}

_VARIANT = {
    **_CODE,
    "kernels": [
        {
            "name": str,
            "scratch": int,
            "inputs": int,
            "dims": int,
            "grid": (int, list),
            "extents": [(int, list)],
            "sizes?": [[int]],
            "aliases": [int],
            "symbol?": str,
            "image?": [int],
            "threads?": int,
            "items?": int,
            "target?": str,
            "resources?": {str: int},
            "launch?": _LAUNCH,
        }
    ],
    "command_buffers": [{"code": int, "states": int, "parameters": int, "turns?": [(int, NONE)]}],
    "functions": {str: {"registers": int, "code": [[ANY]]}},
    "prepared?": {str: {"weights": [int], "takes": [int], "prepare": _HALF, "call": _HALF}},
    "devices?": {str: str},
    "implied?": {str: str},
    "on_host?": [{"function": str, "op": str, "loc": str}],
    "targets?": {str: {"target": str, "features": [str]}},
    "transfers?": [
        {
            "function": str,
            "from": str,
            "to": str,
            "type": str,
            "bytes?": (int, str),
            "reason": str,
            "loc": str,
            "spilled?": bool,
        }
    ],
    "parts?": [{**_CODE, "count": int}],
    "spaces?": [{"device": str, "part": int, "arena": (int, NONE), "constants": int, "pieces": [[int]]}],
    "arena_peak?": (int, NONE),
    "memory_limit?": int,
    "memory?": dict,  # validated when it is shown, which makes loading faster
    "constants?": ({"segment?": int, "external?": _EXTERNAL, "compressed?": _COMPRESSED}, NONE),
}

SCHEMA: dict[Any, Any] = {
    "format": int,
    "producer": str,
    "name": str,
    "functions": {
        str: {
            "arguments": [{**_VALUE, "donated": bool}],
            "results": [_VALUE],
            "in_tree?": (dict, NONE),
            "out_tree?": (dict, NONE),
            "parameters?": [str],
            "doc?": str,
            "state?": {str: str},
            "typical?": {str: int},
            "bound?": [int],
            "bucket?": {"function": str, "sizes": {str: int}},
        }
    },
    "symbols": [str],
    "mesh?": {"axes": [[ANY]], "devices?": [int]},
    "about?": {str: str},
    "variants": [_VARIANT],
    "segments": [{"name": str, "offset": int, "size": int, "sha256": bytes}],
    "debug?": (dict, NONE),
    "costs?": ({"segment": int}, NONE),
    "profile?": ({"segment": int}, NONE),
    "weights?": ({"digest": str, "segment?": int, "file?": str}, NONE),
    "source?": ({"segment": int, "bytes": int, "weights": (int, NONE)}, NONE),
}

accepts = schema_acceptor(SCHEMA)

Entries = Mapping[str, tuple[dict[str, Any], dict[str, Any]]]


def signatures_and_programs(manifest: Mapping[str, Any], variant: Mapping[str, Any]) -> Entries:
    """Return signature and host program of each function of a variant.

    A function with bound arguments has two entries: the programs ``prepare`` and ``call``.
    """
    known = manifest["functions"]
    found = {name: (known[name], program) for name, program in variant["functions"].items()}
    halves = (row[key] for row in variant.get("prepared", {}).values() for key in ("prepare", "call"))
    return found | {row["name"]: (row, row) for row in halves}


def manifest_problem(manifest: Any) -> str:
    """Describe the first place where ``manifest`` violates the schema; an empty string if it is valid."""
    return "" if accepts(manifest) else next(problems(manifest, SCHEMA, "manifest"), "")
