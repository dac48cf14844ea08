"""A limit on memory that a GPU keeps by moving values to the process's memory until they are read again."""

import json
import re

import numpy as np
import pytest
from devices.mixes import ORDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering.test_devices import FIRST, SECOND, T, on_one_device, product, to
from typer.testing import CliRunner
from vmfb.simulated_gpu import install

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.tools.explain.memory import explain_memory
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.profile.cost_record import kernel_text_digest

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

GPU = {"d1": "cuda:sm_90"}
BYTES = 8 * 8 * 4


def tower(count, middle=""):
    """Products that each need the one before, all of which are read again in the reverse order."""
    ops = [f"%a{n} = {product(f'%a{n - 1}' if n else '%x', '%x')}" for n in range(count)]
    ops.append(f"%s0 = {product(f'%a{count - 1}', '%x')}")
    ops.append(middle)
    ops += [f"%s{n + 1} = {product(f'%s{n}', f'%a{count - 1 - n}')}" for n in range(count)]
    body = "\n".join(ops)
    return f"func.func public @main(%x: {T} {SECOND}) -> {T} {{ {body} return %s{count} : {T} }}"


X = (np.eye(8) + np.triu(np.ones((8, 8)))).astype(np.float32) / 2


def facts(data):
    """The bytes of each memory, and the transfers that are not the model's and that are."""
    (variant,) = open_bundle(data).manifest["variants"]
    arenas = {row["device"]: row["arena"] for row in variant.get("spaces", [{"device": "d1", "arena": 0}])}
    if variant["kind"] != "mix":
        arenas = {"d1": variant["arena_peak"]}
    moved = [t for t in variant["transfers"] if t.get("spilled")]
    return arenas, moved, [t for t in variant["transfers"] if not t.get("spilled")]


def results(monkeypatch, data, arrays, orders=tuple(ORDERS)):
    """What a bundle computes on simulated GPUs that take their time, or none; the same in each order."""
    every = []
    for order in (ORDERS[name] for name in orders):
        install(monkeypatch, data, count=2, order=order)
        module = aotc.load(data)
        for _ in range(2):
            every.append([np.asarray(r) for r in module.invoke("main", *arrays)])
    for other in every[1:]:
        for x, y in zip(every[0], other, strict=True):
            np.testing.assert_array_equal(x, y)
    return every[0]


@pytest.mark.parametrize("room", [5, 4, 3])
def test_values_wait_on_the_host(room, monkeypatch):
    """Eight values are alive together: what has no room is moved, the bits are the same."""
    text, limit = tower(8), room * BYTES
    free = aotc.compile(text, devices=GPU, verify_each=True)
    small = aotc.compile(text, devices=GPU, memory_limit=limit, verify_each=True, max_transfers=0)
    arenas, moved, others = facts(small)
    assert arenas["d1"] <= limit < facts(free)[0]["d1"]
    assert arenas.get("", 0) <= limit
    assert not others
    assert {(t["from"], t["to"]) for t in moved} == {("d1", "host memory"), ("host memory", "d1")}
    for x, y in zip(results(monkeypatch, small, [X]), results(monkeypatch, free, [X]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_fits_is_not_moved():
    data = aotc.compile(tower(8), devices=GPU, memory_limit=10 * BYTES)
    assert open_bundle(data).manifest["variants"][0]["kind"] == "cuda"
    assert facts(data)[1] == []


SINE = f"""func.func public @main(%x: {T} {SECOND}) -> {T} {{
  %a = stablehlo.sine %x : {T}
  %p = {product("%a", "%x")}
  %q = {product("%p", "%x")}
  %r = {product("%q", "%p")}
  %s = {product("%r", "%a")}
  return %s : {T} }}"""


def test_what_is_cheap_is_made_again():
    """A sine of an argument is dearer to move than to compute."""
    free = aotc.compile(SINE, devices=GPU, opt_level=0)
    small = aotc.compile(SINE, devices=GPU, memory_limit=facts(free)[0]["d1"] - BYTES, verify_each=True, opt_level=0)
    assert facts(small)[1] == []


def dear_costs(data):
    """A record by which every kernel of a bundle takes a second."""
    debug = open_bundle(data).manifest["debug"]
    rows = [
        {
            "digest": kernel_text_digest(row["text"]), "name": name, "loc": row["loc"], "ops": 1, "sizes": {},
            "runs": 1, "bytes": 1, "ns": {"cuda": 1e9},
        }
        for name, row in debug["kernels"].items()
    ]  # fmt: skip
    return {
        "format": 1, "producer": "", "program": debug["program"], "target": "", "function": "main", "machine": {},
        "versions": {}, "kernels": rows,
    }  # fmt: skip


def test_costs_decide_between_both():
    """With a record by which every kernel takes a second, what could be computed again is moved instead."""
    data = aotc.compile(SINE, devices=GPU, opt_level=0)
    limit = facts(data)[0]["d1"] - BYTES
    small = aotc.compile(SINE, devices=GPU, opt_level=0, memory_limit=limit, costs=dear_costs(data))
    assert len(facts(small)[1]) == 2


def test_beside_the_transfers_of_the_model(monkeypatch):
    """With a device on the CPU: its memory has a limit of its own, and the minimum of transfers is as it was."""
    text = tower(6, f"%t = {to('d0', '%s0')}").replace(
        f"(%x: {T} {SECOND}) -> {T}", f"(%x: {T} {SECOND}, %y: {T} {FIRST}) -> ({T}, {T})"
    )
    text = text.replace("return %s6 :", f"%u = stablehlo.add %t, %y : {T} return %s6, %u : {T},")
    devices = {"d0": "cpu", **GPU}
    free = aotc.compile(text, devices=devices, verify_each=True)
    small = aotc.compile(text, devices=devices, verify_each=True, memory_limit=5 * BYTES, max_transfers=1)
    assert len(facts(free)[2]) == len(facts(small)[2]) == 1
    assert facts(small)[1]
    assert max(facts(small)[0].values()) <= 5 * BYTES
    for x, y in zip(results(monkeypatch, small, [X, X]), results(monkeypatch, free, [X, X]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_two_gpus_have_a_limit_each(monkeypatch):
    second = tower(5).partition("{ ")[2].rpartition(" return")[0]
    second = second.replace("%x", "%w").replace("%a", "%b").replace("%s", "%t")
    first = tower(5).replace(f"(%x: {T} {SECOND}) -> {T}", f"(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T})")
    text = first.replace("return %s5 :", f"{second}\nreturn %s5, %t5 : {T},")
    devices = {"d0": "cuda:sm_90", "d1": "cuda:sm_90"}
    free = aotc.compile(text, devices=devices, verify_each=True)
    small = aotc.compile(text, devices=devices, verify_each=True, memory_limit=4 * BYTES)
    arenas, moved, _ = facts(small)
    assert {t["from"] for t in moved} == {"d0", "d1", "host memory"}
    assert max(arenas.values()) <= 4 * BYTES
    arrays = [X, X / 2]
    for x, y in zip(results(monkeypatch, small, arrays), results(monkeypatch, free, arrays), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_limit_that_cannot_be_kept_says_by_how_much():
    with pytest.raises(CompileError) as caught:
        aotc.compile(tower(8), devices=GPU, memory_limit=2 * BYTES)
    message = str(caught.value)
    said = re.search(r"needs ([\d,]+) bytes on d1, ([\d,]+) more than the memory limit of 512", message)
    taken, over = (int(n.replace(",", "")) for n in said.groups())
    assert taken - over == 2 * BYTES
    assert f"{BYTES} bytes of k" in message
    assert "all remaining values are needed at that point" in message


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("cpu", "a CPU has no other memory to move values to"),
        ("cuda:sm_90", "with --device NAME=cuda, values can also move from the GPU to the host"),
    ],
)
def test_where_there_is_nothing_to_move_to(target, said):
    with pytest.raises(CompileError, match=said):
        aotc.compile(tower(8).replace(SECOND, ""), target=target, memory_limit=4 * BYTES)


def test_what_is_moved_is_listed(tmp_path):
    from aotc_cli.main import app

    path = tmp_path / "m.vmfb"
    path.write_bytes(aotc.compile(tower(8), devices=GPU, memory_limit=4 * BYTES))
    spills = facts(path.read_bytes())[1]
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(path)]).output.split())
    assert f"0 transfers, and {len(spills)} for the memory limit" in shown
    assert "f32[8, 8] (256 B) from d1 to host memory: the memory limit: not read until later" in shown
    (variant,) = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).output)["variants"]
    assert [t["spilled"] for t in variant["transfers"]] == [True] * len(spills)
    report = explain_memory(open_bundle(str(path)))
    assert len(report.spills) == len(spills)
    assert set(report.arenas) == {"cpu", "d1"}
    output = " ".join(CliRunner().invoke(app, ["explain", "memory", str(path)]).output.split())
    assert f"{len(spills)} transfers for the memory limit" in output


def random_dag(rng):
    """A chain of products on two devices, in whose second half any earlier values are read again."""
    count = int(rng.integers(8, 16))
    names, lines = ["%x"], []
    for n in range(count):
        again = names[int(rng.integers(len(names)))] if 2 * n > count else "%x" if rng.integers(4) else "%w"
        last = names[-1]
        if not rng.integers(5):
            lines.append(f"%t{n} = {to(f'd{rng.integers(2)}', last)}")
            last = f"%t{n}"
        op = f"stablehlo.add {last}, {again} : {T}" if not rng.integers(4) else product(last, again)
        lines.append(f"%v{n} = {op}\n%m{n} = stablehlo.multiply %v{n}, %half : {T}")
        names.append(f"%m{n}")
    kept = [names[-1], names[int(rng.integers(1, len(names)))]]
    body = "\n".join(lines)
    return f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %half = stablehlo.constant dense<0.3> : {T}
      {body}
      return {", ".join(kept)} : {T}, {T} }}"""


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.integers(20, 95), both=st.booleans())
def test_random_programs_keep_their_limit_or_are_refused(seed, share, both):
    text = random_dag(np.random.default_rng(seed))
    devices = {"d0": "cuda:sm_90" if both else "cpu", "d1": "cuda:sm_90"}
    free = aotc.compile(text, devices=devices)
    limit = max(max(facts(free)[0].values()) * share // 100, 1)
    try:
        small = aotc.compile(text, devices=devices, memory_limit=limit, verify_each=True)
    except CompileError as error:
        assert "more than the memory limit" in str(error)  # noqa: PT017
        return
    arenas, _, model = facts(small)
    assert max(arenas.values()) <= limit
    assert len(model) == len(facts(free)[2])
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((8, 8)).astype(np.float32) / 4 for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        got, want = results(patch, small, arrays), results(patch, free, arrays)
    expected = interpret(import_model(on_one_device(text)), *arrays)
    for x, y, z in zip(got, want, expected, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-4)
