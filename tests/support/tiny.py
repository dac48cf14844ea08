"""A small handwritten bundle: a serial executor and four kernels in C, and a builder of command buffers.

The runtime's tests use it, as it needs no compiler of aotc.
"""

import shutil
import subprocess
import tempfile
from copy import copy as copy_record
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from aotc.vmfb.abi import (
    COPY,
    DISPATCH,
    INTERFACE_SYMBOL,
    Case,
    Command,
    Graph,
    WhileNode,
    constant_operand,
    parameter_operand,
)
from aotc.vmfb.assembly import assemble
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.commands import encode_commands
from aotc.vmfb.verify.kernel_interface import interface_digest

EXECUTOR = r"""
#include <stdint.h>
#include <string.h>
typedef int64_t I;
typedef void (*Kernel)(void **, I *, I, I, void *);
I aotc_executor_version(void) { return 6; }
I aotc_pool_bytes(void) { return 128; }
static I value(I word, I *params) { return word & 1 ? params[word >> 1] : word >> 1; }
static void nodes(I *at, I *end, void **slots, I *params, void *scratch);
static void graph(I *node, void **slots, I *params, void *scratch) {
  for (I c = 0; c < node[2]; c++) {
    I *w = node + node[5 + c], *places = w + 8 + w[5], *rest = places + 2 * w[6];
    void *at[16];
    I dims[16];
    if (w[0] == 2) {
      nodes(rest, rest + w[7], slots, params, scratch);
      continue;
    }
    for (I i = 0; i < w[6]; i++) at[i] = (char *)slots[places[2 * i]] + value(places[2 * i + 1], params);
    for (I i = 0; i < w[7]; i++) dims[i] = value(rest[i], params);
    if (w[0] == 1) memmove(at[1], at[0], dims[0]);
    else ((Kernel)w[1])(at, dims, 0, value(w[2], params), scratch);
  }
}
static void nodes(I *at, I *end, void **slots, I *params, void *scratch) {
  for (; at < end; at += at[1]) {
    if (at[0] == 1) graph(at, slots, params, scratch);
    else if (at[0] == 2) {
      I *body = at + 6 + at[2];
      for (;;) {
        nodes(at + 6, body, slots, params, scratch);
        if (!((char *)slots[at[4]])[value(at[5], params)]) break;
        nodes(body, body + at[3], slots, params, scratch);
      }
    } else {
      I n = at[2], pick = *(int32_t *)((char *)slots[at[3]] + value(at[4], params));
      if (pick < 0 || pick >= n) pick = n - 1;
      I *branch = at + 5 + n;
      for (I i = 0; i < pick; i++) branch += at[5 + i];
      nodes(branch, branch + at[5 + pick], slots, params, scratch);
    }
  }
}
I aotc_run(I *call) {
  I *code = (I *)call[8];
  nodes(code, code + call[9], (void **)call[3], (I *)call[4], *(void **)call[7]);
  return 0;
}
"""

KERNELS = r"""
#include <stdint.h>
typedef int64_t I;
static void add(void **p, I *d, I begin, I end, void *s) {
  float *a = p[0], *b = p[1], *out = p[2];
  for (I i = begin; i < end; i++) out[i] = a[i] + b[i];
}
static void scale(void **p, I *d, I begin, I end, void *s) {
  float *a = p[0], *w = p[1], *out = p[2];
  for (I i = begin; i < end; i++) out[i] = a[i] * w[0];
}
static void count(void **p, I *d, I begin, I end, void *s) {
  I *limit = p[0], *n = p[1];
  *n += d[0];
  *(char *)p[2] = *n < *limit;
}
static void iota(void **p, I *d, I begin, I end, void *s) {
  float *out = p[0];
  for (I i = begin; i < end; i++) out[i] = (float)i;
}
void *aotc_kernels[4] = {add, scale, count, iota};
"""

ADD, SCALE, COUNT, IOTA = range(4)


def kernel(name, inputs, extents, dims=1, grid=None, aliases=()):
    """Return the manifest entry of a kernel; by default its grid is its dim."""
    about = {"inputs": inputs, "dims": dims, "grid": [0] if grid is None else grid, "extents": extents}
    return {"name": name, "scratch": 0, **about, "aliases": list(aliases), "flops": 0, "bytes": 0}


VERSIONS = {"executor_version": 6, "commands_version": 2}
FLOATS = ["*", 4, [0]]  # as many as the kernel's dim says
INTERFACE = [
    kernel("add", 2, [FLOATS] * 3, aliases=[0, 0]),
    kernel("scale", 2, [FLOATS, 4, FLOATS]),
    kernel("count", 1, [8, 8, 1], grid=1),
    kernel("iota", 0, [FLOATS]),
]


@cache
def shared_object(source: str) -> bytes:
    """Compile C source to a shared object; skip the test on a machine without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        code, out = Path(folder, "x.c"), Path(folder, "x.so")
        code.write_text(source)
        subprocess.run([compiler, "-Os", "-s", "-shared", "-fPIC", "-o", out, code], check=True)
        return out.read_bytes()


def sealed(source: str, variant: dict) -> bytes:
    """Compile C source of kernels to the library that a variant describes."""
    numbers = ", ".join(map(str, interface_digest(variant)))
    return shared_object(f"{source}\nconst unsigned char {INTERFACE_SYMBOL}[32] = {{{numbers}}};\n")


def seal(variant, segments, source=KERNELS):
    """Give a modified variant its own library with a matching description."""
    segments.append(("library", sealed(source, variant)))
    variant["library"] = len(segments) - 1
    return variant


def place(slot, offset=0):
    """Return a place in a slot; an odd ``offset`` is an operand."""
    return slot, offset if offset & 1 else constant_operand(offset)


def dispatch(kernel, items, places, dims=None):
    """Return a dispatch: ``items`` and ``dims`` are operands; by default a kernel's dim is its items."""
    dims = [items] if dims is None else dims
    return Command(DISPATCH, kernel, items, constant_operand(1), 0, (), places, dims)


def copy(source, destination, size):
    """Return the words of a copy command; ``size`` is the operand with the number of bytes."""
    return Command(COPY, 0, constant_operand(1), constant_operand(1), 0, (), [source, destination], [size])


def graph(*commands, state=0, serial=1):
    """Return a graph whose commands run one after the other."""
    last = len(commands) - 1
    chain = [copy_record(command) for command in commands]
    for n, command in enumerate(chain):
        command.predecessors, command.successors = int(n > 0), [n + 1] if n < last else []
    return Graph(chain, state, bool(serial))


def value(name, dtype, *dims, **more):
    """Return the manifest entry of a value of a signature."""
    return {"name": name, "dtype": dtype, "dims": list(dims), **more}


def argument(name, dtype, *dims, donated=False):
    """Return the manifest entry of an argument of a signature."""
    return value(name, dtype, *dims, donated=donated)


FUNCTIONS = {
    "main": {
        "arguments": [argument("x", "f32", 4), argument("y", "f32", 4)],
        "results": [value("", "f32", 4)],
        "in_tree": None,
        "out_tree": None,
    },
    "grow": {  # (2 x) * w, through the arena
        "arguments": [argument("x", "f32", "n")],
        "results": [value("", "f32", "n")],
        "in_tree": None,
        "out_tree": None,
    },
    "count": {
        "arguments": [argument("limit", "i64")],
        "results": [value("", "i64")],
        "in_tree": None,
        "out_tree": None,
    },
    "upto": {
        "arguments": [argument("n", "i64")],
        "results": [value("", "f32", "?")],
        "in_tree": None,
        "out_tree": None,
    },
    "update": {  # x += y in the argument's memory, then out
        "arguments": [argument("x", "f32", 4, donated=True), argument("y", "f32", 4)],
        "results": [value("", "f32", 4)],
        "in_tree": None,
        "out_tree": None,
    },
    "pick": {
        "arguments": [argument("i", "i32"), argument("x", "f32", 4), argument("y", "f32", 4)],
        "results": [value("", "f32", 4)],
        "in_tree": None,
        "out_tree": None,
    },
}

PROGRAMS = {
    "main": (1, "const r0, 4 \n result 0, [r0] \n submit cb0, [] \n return"),
    "grow": (
        4,
        """
        dim r0, arg0, axis0
        const r1, 4
        le r3, r1, r0
        assert_true r3, "n is {0}, expected at least 4", [r0]
        mul r2, r0, r1
        arena r2
        result 0, [r0]
        submit cb1, [r0]
        return
        """,
    ),
    "count": (1, "const r0, 64 \n arena r0 \n result 0, [] \n submit cb2, [] \n return"),
    "upto": (
        3,
        """
        const r0, 0
        load_scalar r1, slot0, r0, %i64
        lt r2, r1, r0
        branch_if r2, @6
        result 0, [r1]
        branch @7
        result 0, [r0]
        submit cb3, [r1]
        return
        """,
    ),
    "update": (1, "const r0, 4 \n result 0, [r0] \n submit cb4, [] \n return"),
    "pick": (1, "const r0, 4 \n result 0, [r0] \n submit cb5, [] \n return"),
}
PROGRAMS = {
    name: (registers, text.replace("result 0", "result res0")) for name, (registers, text) in PROGRAMS.items()
}


def command_buffers():
    """The words of every command buffer, its cells and its parameters."""
    n, four = parameter_operand(0), constant_operand(4)
    step = graph(dispatch(COUNT, constant_operand(1), [place(0), place(1), place(2)], [constant_operand(1)]))
    start = graph(dispatch(COUNT, constant_operand(1), [place(0), place(1), place(2)], [constant_operand(0)]))
    add = dispatch(ADD, four, [place(0), place(1), place(2)])
    double, scale = dispatch(ADD, n, [place(0), place(0), place(2)]), dispatch(SCALE, n, [place(2), place(3), place(1)])
    update = dispatch(ADD, four, [place(0), place(1), place(0)])
    first, second = (graph(copy(place(slot), place(3), constant_operand(16))) for slot in (1, 2))
    buffers = [
        ([graph(add)], 1, 0),
        ([graph(double, scale, serial=0)], 2, 1),
        ([graph(copy(place(3, 64), place(1), constant_operand(8))), WhileNode([start], [step], place(2))], 1, 0),
        ([graph(dispatch(IOTA, n, [place(1)]))], 1, 1),
        ([graph(update, copy(place(0), place(2), constant_operand(16)))], 2, 0),
        ([Case([[first], [second]], place(0))], 1, 0),
    ]
    return [(encode_commands(nodes), states, parameters) for nodes, states, parameters in buffers]


def constants(size=128):
    """Return the constants: the weight 3.0 at 0, zeros from 64 on."""
    data = np.zeros(max(size, 128), np.uint8)
    data[:4] = np.frombuffer(np.float32(3).tobytes(), np.uint8)
    return data


def parts(weights=None):
    """Return a new (manifest, segments) of the whole tiny bundle, for modification."""
    buffers = command_buffers()
    segments = [
        ("executor", shared_object(EXECUTOR)),
        ("library", sealed(KERNELS, {**VERSIONS, "kind": "cpu", "features": [], "kernels": INTERFACE})),
        ("constants", constants().tobytes() if weights is None else weights),
        *((f"commands{i}", np.array(words, "<i8").tobytes()) for i, (words, _, _) in enumerate(buffers)),
    ]
    variant = {
        "target": "cpu:any",
        "kind": "cpu",
        "features": [],
        **VERSIONS,
        "executor": 0,
        "library": 1,
        "kernels": [dict(entry) for entry in INTERFACE],
        "command_buffers": [
            {"code": 3 + i, "states": states, "parameters": parameters}
            for i, (_, states, parameters) in enumerate(buffers)
        ],
        "functions": {
            name: {"registers": registers, "code": assemble(text)} for name, (registers, text) in PROGRAMS.items()
        },
        "arena_peak": None,
        "constants": {"segment": 2},
    }
    manifest = {
        "format": 1,
        "producer": "tests",
        "name": "tiny",
        "functions": {name: {**entry} for name, entry in FUNCTIONS.items()},
        "symbols": ["n"],
        "variants": [variant],
        "debug": None,
    }
    return manifest, segments


@cache
def bundle() -> bytes:
    """Return the whole tiny bundle."""
    return write_bundle(None, *parts())
