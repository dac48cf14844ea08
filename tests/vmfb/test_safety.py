"""Bundles whose sums are right and whose data is wrong: each is refused, none touches memory that is not its own."""

import struct

import numpy as np
import pytest
from support import tiny

from aotc.vmfb.abi import Graph, WhileNode, constant_operand, parameter_operand
from aotc.vmfb.assembly import assemble
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.commands import encode_commands
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.module import load
from aotc.vmfb.verify.kernel_interface import Invalid, evaluate_size, interface_digest

pytestmark = pytest.mark.ir

X, Y = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)
ARGUMENTS = {"main": [X, Y], "grow": [X], "count": [np.int64(3)], "upto": [np.int64(3)], "update": [X, Y]}
BUFFERS = ["main", "grow", "count", "upto", "update"]


def call(manifest, segments, name):
    """Load a bundle and call one of its functions."""
    return load(write_bundle(None, manifest, segments), threads=1).invoke(name, *ARGUMENTS[name])


def with_program(name, text, registers=2):
    """The tiny bundle with another program for a function."""
    manifest, segments = tiny.parts()
    program = {"registers": registers, "code": assemble(text)}
    manifest["variants"][0]["functions"][name] = program
    return manifest, segments, name


def with_nodes(name, *nodes, states=2):
    """The tiny bundle with another command buffer for a function."""
    manifest, segments = tiny.parts()
    row = manifest["variants"][0]["command_buffers"][BUFFERS.index(name)]
    row["states"] = states
    segments[row["code"]] = ("commands", np.array(encode_commands(nodes), "<i8").tobytes())
    return manifest, segments, name


def with_kernel(**changed):
    """The tiny bundle with another entry of its first kernel, and the same library."""
    manifest, segments = tiny.parts()
    manifest["variants"][0]["kernels"][0].update(changed)
    return manifest, segments, "main"


def alone(name, kernel, items, places, dims=None):
    """The tiny bundle whose function dispatches one kernel."""
    return with_nodes(name, tiny.graph(tiny.dispatch(kernel, items, places, dims)), states=1)


FOUR, FIVE, SIXTEEN, N = *map(constant_operand, (4, 5, 16)), parameter_operand(0)
AT = tiny.place
STEP = [constant_operand(1)]
REFUSED = {
    "an offset far away": (
        lambda: alone("main", tiny.ADD, FOUR, [AT(0), AT(1), AT(2, 1 << 40)]), "16 bytes at 1099511627776 of slot 2"
    ),
    "an offset that no compiler makes": (
        lambda: alone("main", tiny.ADD, FOUR, [AT(0), AT(1, 4), AT(2)]), "16 bytes at 4 of slot 1, which has 16"
    ),
    "a grid of its own": (
        lambda: alone("main", tiny.ADD, FIVE, [AT(0), AT(1), AT(2)], [FOUR]), "runs 5 items, its grid has 4"
    ),
    "dims that are too large": (
        lambda: alone("main", tiny.ADD, FIVE, [AT(0), AT(1), AT(2)]), "20 bytes at 0 of slot 0, which has 16"
    ),
    "too few places": (lambda: alone("main", tiny.ADD, FOUR, [AT(0), AT(1)]), "given 2 arrays and 1 dims, not 3"),
    "too few dims": (lambda: alone("main", tiny.ADD, FOUR, [AT(0), AT(1), AT(2)], []), "3 arrays and 0 dims"),
    "the constants overwritten": (
        lambda: alone("main", tiny.ADD, FOUR, [AT(0), AT(1), AT(4)]), "writes slot 4, which is to be read only"
    ),
    "an argument overwritten": (
        lambda: alone("main", tiny.ADD, FOUR, [AT(0), AT(1), AT(0)]), "writes slot 0, which is to be read only"
    ),
    "an argument copied over": (
        lambda: with_nodes("main", tiny.graph(tiny.copy(AT(1), AT(0), SIXTEEN)), states=1), "a copy writes slot 0"
    ),
    "a copy that is too long": (
        lambda: with_nodes("main", tiny.graph(tiny.copy(AT(1), AT(2), constant_operand(17))), states=1),
        "a copy: 17 bytes at 0 of slot 1, which has 16",
    ),
    "a result over an input": (
        lambda: alone("update", tiny.SCALE, FOUR, [AT(0), AT(4, 64), AT(0)]), "writes its array 2 over its array 0"
    ),
    "a flag that is not there": (
        lambda: with_nodes("main", WhileNode([], [], AT(2, 16)), states=0), "1 bytes at 16 of slot 2"
    ),
    "no arena": (
        lambda: with_program("grow", "dim r0, arg0, axis0\nresult res0, [r0]\nsubmit cb1, [r0]\nreturn"),
        "16 bytes at 0 of slot 2, which has 0",
    ),
    "a result after its use": (
        lambda: with_program("main", "const r0, 4\nsubmit cb0, []\nresult res0, [r0]\nreturn"), "of slot 2, which has 0"
    ),
    "a small result": (
        lambda: with_program("grow", """dim r0, arg0, axis0
            const r1, 64\narena r1\nconst r1, 2\nresult res0, [r1]\nsubmit cb1, [r0]\nreturn"""),
        "16 bytes at 0 of slot 1, which has 8",
    ),
    "a result that the signature does not have": (
        lambda: with_program("main", "const r0, 5\nresult res0, [r0]\nsubmit cb0, []\nreturn"), r"shape \(5,\), not"
    ),
    "a result of less than nothing": (
        lambda: with_program("grow", "const r0, -1\nresult res0, [r0]\nsubmit cb1, [r0]\nreturn"), r"shape \(-1,\)"
    ),
    "a result twice": (
        lambda: with_program("main", "const r0, 4\nresult res0, [r0]\nresult res0, [r0]\nsubmit cb0, []\nreturn"),
        "made twice",
    ),
    "an arena of less than nothing": (
        lambda: with_program("count", "const r0, -1\narena r0\nsubmit cb2, []\nreturn"), "an arena of -1 bytes"
    ),
    "an arena of everything": (
        lambda: with_program("count", f"const r0, {1 << 50}\narena r0\nsubmit cb2, []\nreturn"),
        f"an arena of {1 << 50} bytes",
    ),
    "an endless program": (lambda: with_program("count", "branch @0\nreturn"), "goes back to 0"),
    "a program without end": (lambda: with_program("count", "const r0, 0\nbranch @1"), "does not end with return"),
    "registers without number": (lambda: with_program("count", "return", 1 << 40), "registers for 1 instructions"),
    "cells without number": (
        lambda: with_nodes("main", tiny.graph(tiny.dispatch(tiny.ADD, FOUR, [AT(0), AT(1), AT(2)])), states=1 << 40),
        "cells where 1 are used",
    ),
    "a read far away": (
        lambda: with_program("upto", """const r0, 1099511627776
            load_scalar r1, slot0, r0, %i64\nresult res0, [r1]\nsubmit cb3, [r1]\nreturn"""),
        "8 bytes at 1099511627776 of slot 0",
    ),
    "a submission that depends on data": (
        lambda: with_program("upto", """const r0, 0\nload_scalar r1, slot0, r0, %i64
            result res0, [r0]\nsubmit cb3, [r1]\nreturn"""),
        "12 bytes at 0 of slot 1, which has 0",
    ),
    "other extents than the library's": (lambda: with_kernel(extents=[0, 0, 0]), "not what the manifest describes"),
    "other scratch than the library's": (lambda: with_kernel(scratch=64), "not what the manifest describes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bundle_is_refused(case):
    make, message = REFUSED[case]
    manifest, segments, name = make()
    with pytest.raises(BundleError, match=message):
        call(manifest, segments, name)


def test_a_static_program_is_proven_at_load_when_asked():
    manifest, segments, _ = REFUSED["an offset far away"][0]()
    data = write_bundle(None, manifest, segments)
    load(data, threads=1)
    with pytest.raises(BundleError, match="of slot 2, which has 16"):
        load(data, threads=1, verify=True)


def test_another_bundles_library_is_refused():
    manifest, segments = tiny.parts()
    other = {**tiny.VERSIONS, "kind": "cpu", "features": [], "kernels": tiny.INTERFACE[:2]}
    segments[1] = ("library", tiny.sealed(tiny.KERNELS, other))
    with pytest.raises(BundleError, match="not what the manifest describes"):
        call(manifest, segments, "main")


def test_a_claim_that_would_wrap_around():
    buffer = Graph([tiny.dispatch(tiny.ADD, FOUR, [AT(0), AT(1), AT(2)])], 0, False)
    buffer.commands[0].grain = constant_operand(1 << 61)
    manifest, segments, name = with_nodes("main", buffer, states=1)
    with pytest.raises(BundleError, match="items at a time"):
        call(manifest, segments, name)


def test_arithmetic_beyond_a_word():
    squares = "\n".join(["mul r0, r0, r0"] * 40)
    text = f"const r0, 3\n{squares}\narena r0\nresult res0, []\nsubmit cb2, []\nreturn"
    manifest, segments, name = with_program("count", text)
    with pytest.raises(CallError, match="leaves 64 bits"):
        call(manifest, segments, name)


def test_memory_that_nobody_has(monkeypatch):
    class Refusing:  # whether the system refuses depends on how much it promises
        uint8, dtype = np.uint8, np.dtype

        @staticmethod
        def empty(size, dtype):
            raise MemoryError

    monkeypatch.setattr("aotc.vmfb.memory.arena.np", Refusing)
    size = 1 << 46
    text = f"const r0, {size}\narena r0\nresult res0, []\nsubmit cb2, []\nreturn"
    manifest, segments, name = with_program("count", text)
    with pytest.raises(CallError, match="bytes of working memory"):
        call(manifest, segments, name)


def test_submissions_of_interpreted_programs_are_checked_once():
    module = load(tiny.bundle(), threads=1)
    for n in (3, 3, 5):
        assert len(module.invoke("upto", np.int64(n))[0]) == n
    assert len(module._functions["upto"].proven) == 2


@pytest.mark.parametrize(
    ("size", "dims", "value"),
    [(7, [], 7), ([1], [2, 5], 5), (["*", 4, [0], ["+", [1], 1]], [2, 5], 48), (["max", ["//", [0], 2], 3], [20], 10)],
)
def test_size_expressions_are_evaluated(size, dims, value):
    assert evaluate_size(size, dims) == value


@pytest.mark.parametrize("size", [[], ["^", 1, 2], [9], ["//", 1, 0], ["*", "a", 2], [[[]]]])
def test_sizes_without_a_value_are_refused(size):
    with pytest.raises(Invalid, match="has no value"):
        evaluate_size(size, [1])


def test_the_digest_covers_what_a_call_depends_on():
    variant = tiny.parts()[0]["variants"][0]
    changed = [
        {"features": ["avx2"]},
        {"imports": {"lapack": ["dgetrf"]}},
        {"custom_calls": [{"symbol": "f", "operands": [], "results": []}]},
        {"kernels": variant["kernels"][1:]},
        *({"kernels": [{**variant["kernels"][0], key: 9}]} for key in ("inputs", "dims", "grid", "extents", "aliases")),
    ]
    found = {interface_digest({**variant, **change}) for change in [{}, *changed]}
    assert len(found) == len(changed) + 1


def test_weights_that_end_before_the_constants_do(tmp_path):
    import json

    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-(8 + len(header)) % 64)
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 3))
    manifest, segments = tiny.parts()
    tensor = {"name": "w", "dtype": "f32", "shape": [1], "offset": 0, "size": 4, "sha256": b""}
    external = {"file": "w.safetensors", "size": 1 << 40, "tensors": [tensor]}
    manifest["variants"][0]["constants"] = {"external": external}
    path = tmp_path / "m.vmfb"
    path.write_bytes(write_bundle(None, manifest, segments))
    assert load(path, threads=1)._executable.constants_bytes == 4
    with pytest.raises(BundleError, match="8 bytes at 64 of slot 3, which has 4"):
        load(path, threads=1).invoke("count", *ARGUMENTS["count"])
