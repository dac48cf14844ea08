"""Large programs: time in proportion to their length, no limit on depth, and an arena as small as before."""

import time

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.program.ir import Storage
from aotc.lowering.lower import lower
from aotc.lowering.program.dependences import MemoryAccesses
from aotc.lowering.program.plan_memory import plan_memory
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

pytestmark = pytest.mark.cpu


def chain(count):
    """Return a program of ``count`` scalar functions one after the other, and a reduction after every 16."""
    lines = ["%z = stablehlo.constant dense<0.0> : tensor<f32>"]
    for k in range(count):
        function, operand = ("cosine", "sine")[k % 2], "b" if k and k % 16 == 0 else "v"
        lines.append(f"%v{k + 1} = stablehlo.{function} %{operand}{k} : tensor<8xf32>")
        if k % 16 == 15:
            lines.append(
                f"%r{k} = stablehlo.reduce(%v{k + 1} init: %z) applies stablehlo.add across dimensions = [0]"
                " : (tensor<8xf32>, tensor<f32>) -> tensor<f32>"
            )
            lines.append(f"%b{k + 1} = stablehlo.broadcast_in_dim %r{k}, dims = [] : (tensor<f32>) -> tensor<8xf32>")
    return program(lines, f"%v{count}")


def wide(count):
    """Return a program of ``count / 2`` products that do not depend on each other and are all needed at the end."""
    lines = []
    for k in range(count // 2):
        lines.append(f"%s{k} = stablehlo.constant dense<{k + 1}.0> : tensor<8xf32>")
        lines.append(f"%r{k} = stablehlo.reverse %{f'r{k - 7}' if k >= 7 else 'v0'}, dims = [0] : tensor<8xf32>")
    total = "%v0"
    for k in range(count // 2):
        lines.append(f"%t{k} = stablehlo.multiply %r{k}, %s{k} : tensor<8xf32>")
        lines.append(f"%u{k} = stablehlo.add {total}, %t{k} : tensor<8xf32>")
        total = f"%u{k}"
    return program(lines, total)


def program(lines, result):
    body = "\n".join(lines)
    return f"func.func @main(%v0: tensor<8xf32>) -> tensor<8xf32> {{\n{body}\nreturn {result} : tensor<8xf32>\n}}"


def seconds(text):
    """Return the time that this thread computes from text to kernels in loop IR and command buffers."""
    options, (target,) = Options(), resolve_targets("cpu")
    begin = time.thread_time()
    lower(run_passes(import_model(text.encode()), options), target, options)
    return time.thread_time() - begin


@pytest.mark.parametrize("make", [chain, wide])
def test_compile_time_is_linear_in_the_length(make):
    few, many = 400, 3200
    seconds(make(few))
    small = min(seconds(make(few)) for _ in range(3))
    assert any(seconds(make(many)) / small < 2 * many / few for _ in range(3))  # again only if one was disturbed


@pytest.mark.slow
def test_a_chain_of_twenty_thousand_ops_compiles():
    text = chain(20_000)
    x = np.linspace(0, 1, 8, dtype=np.float32)
    (found,) = aotc.load(aotc.compile(text.encode())).invoke("main", x)
    want = x
    for k in range(20_000):
        want = (np.cos, np.sin)[k % 2](want if k % 16 or not k else np.full(8, want.sum(), np.float32))
    np.testing.assert_allclose(found, want, rtol=1e-4)


def test_nested_calls_of_500_functions_compile():
    """Each function adds 1 to what the one before it gives."""
    functions = ["func.func private @f0(%x: tensor<4xf32>) -> tensor<4xf32> {\nreturn %x : tensor<4xf32>\n}"]
    for k in range(1, 500):
        functions.append(f"""func.func private @f{k}(%x: tensor<4xf32>) -> tensor<4xf32> {{
          %y = func.call @f{k - 1}(%x) : (tensor<4xf32>) -> tensor<4xf32>
          %c = stablehlo.constant dense<1.0> : tensor<4xf32>
          %z = stablehlo.add %y, %c : tensor<4xf32>
          return %z : tensor<4xf32>
        }}""")
    functions.append("""func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %y = func.call @f499(%x) : (tensor<4xf32>) -> tensor<4xf32>
      return %y : tensor<4xf32>
    }""")
    (found,) = aotc.load(aotc.compile("\n".join(functions).encode())).invoke("main", np.ones(4, np.float32))
    np.testing.assert_array_equal(found, np.full(4, 500.0))


@pytest.mark.parametrize("level", [0, 2])
def test_long_chains_of_movement_ops_compile(level):
    """Each step turns the rows around and shifts the columns by one."""
    lines = []
    for k in range(600):
        lines.append(f"%r{k} = stablehlo.reverse %v{k}, dims = [0] : tensor<3x4xf32>")
        lines.append(f"%a{k} = stablehlo.slice %r{k} [0:3, 1:4] : (tensor<3x4xf32>) -> tensor<3x3xf32>")
        lines.append(f"%b{k} = stablehlo.slice %r{k} [0:3, 0:1] : (tensor<3x4xf32>) -> tensor<3x1xf32>")
        lines.append(
            f"%v{k + 1} = stablehlo.concatenate %a{k}, %b{k}, dim = 1"
            " : (tensor<3x3xf32>, tensor<3x1xf32>) -> tensor<3x4xf32>"
        )
    text = program(lines, "%v600").replace("tensor<8xf32>", "tensor<3x4xf32>")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (found,) = aotc.load(aotc.compile(text.encode(), opt_level=level)).invoke("main", x)
    np.testing.assert_array_equal(found, x)


def branches(depth):
    """Return ``depth`` branches, one inside the other, each of which adds 1 to the inner one's result."""
    inner = "stablehlo.return %v0 : tensor<8xf32>"
    for k in range(depth):
        inner = f"""%c{k} = "stablehlo.if"(%p) ({{
          {inner}
        }}, {{
          stablehlo.return %v0 : tensor<8xf32>
        }}) : (tensor<i1>) -> tensor<8xf32>
        %d{k} = stablehlo.add %c{k}, %one : tensor<8xf32>
        stablehlo.return %d{k} : tensor<8xf32>"""
    body = inner.rsplit("stablehlo.return", 1)[0]
    lines = ["%one = stablehlo.constant dense<1.0> : tensor<8xf32>", body]
    return program(lines, f"%d{depth - 1}").replace("%v0: tensor<8xf32>)", "%v0: tensor<8xf32>, %p: tensor<i1>)")


def test_branches_nested_up_to_the_limit_compile():
    module = aotc.load(aotc.compile(branches(32).encode()))
    for p, want in ((True, 32), (False, 1)):
        np.testing.assert_array_equal(module.invoke("main", np.zeros(8, np.float32), np.bool_(p))[0], np.full(8, want))
    with pytest.raises(CompileError, match="nested more than 32 deep"):
        aotc.compile(branches(33).encode())


def storages(seed):
    """Return storages of random sizes and lifetimes."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(rng.integers(0, 120)):
        s = Storage("arena", int(rng.choice([0, 4, 64, 100, 1000, 4096])))
        s.first = int(rng.integers(400))
        s.last = s.first + int(rng.choice([0, 1, 5, 100]))
        made.append(s)
    return made


@pytest.mark.parametrize("seed", range(8))
def test_the_arena_is_as_large_as_first_fit_by_size(seed):
    made = storages(seed)
    total = plan_memory(made)
    placed, top = [], 0
    for s in sorted(made, key=lambda s: (-s.size, s.first)):
        size, at = -(-s.size // 64) * 64, 0
        for other in sorted((p for p in placed if p.first <= s.last and s.first <= p.last), key=lambda p: p.offset):
            if at + size <= other.offset:
                break
            at = max(at, other.offset + -(-other.size // 64) * 64)
        assert s.offset == at
        placed.append(s)
        top = max(top, at + size)
    assert total == top


@pytest.mark.parametrize("seed", range(8))
def test_commands_wait_for_the_last_accesses_to_their_bytes(seed):
    """The commands that are waited for are those that wrote a byte last, and for a write who read it since."""
    rng = np.random.default_rng(seed)
    memory, writer, readers = MemoryAccesses(), np.full(64, -1), [set() for _ in range(64)]
    for command in range(200):
        begin, size = rng.integers(0, 48), rng.integers(0, 16)
        s = Storage("arena", int(size), offset=int(begin))
        span = range(begin, begin + size)
        last = {int(writer[b]) for b in span} - {-1}
        if rng.integers(2):
            assert set(memory.read(s, command)) == last
            for b in span:
                readers[b].add(command)
        else:
            assert set(memory.write(s, command)) == last.union(*(readers[b] for b in span))
            for b in span:
                writer[b], readers[b] = command, set()
