"""Carried buffers are updated in place where that is right: against NumPy, with rubbish in all other memory.

The steps run on NumPy, and so do the kernels as the loop IR means them (``support.program_run``); the arena and the
results hold rubbish at first. Random programs: ``support.programs.carried``.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.program_run import run_program
from support.programs.carried import NAMES, Assign, Carried, Choose, Combine, Repeat, Set, arrays_for, random_program

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.program.ir import Copy, Launch, Loop, walk
from aotc.lowering.lower import lower
from aotc.lowering.passes.canonicalize import array_passes
from aotc.lowering.program.memories import Memories
from aotc.lowering.program.owners import alternate_buffers, exchange_buffers
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.devices.cuda import driver as cuda_driver

SIZE = 7
CPU, GPU = "cpu:x86-64-v3", "cuda:sm_90"
X, Y, Z = NAMES


def lowered(function, arguments, target=CPU, donated=(), **options):
    """Return the public function of a program, and its steps and constants."""
    chosen = Options(target=target, verify_each=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of donated arguments that JAX has no use for
        raw = fetch(jax.jit(function, donate_argnums=donated, keep_unused=True), arguments, {})
    module = run_passes(import_raw(raw, options=chosen, platform=target.split(":")[0]), chosen)
    variant = lower(module, resolve_targets(target)[0], chosen)
    (main,) = (f for f in module.functions.values() if f.public)
    return main, variant.steps[main.name], variant.constants


def check(program, level, target=CPU, seed=0):
    arrays = arrays_for(program, SIZE, seed)
    main, steps, constants = lowered(program.function(), arrays, target, program.donated, opt_level=level)
    for got, want in zip(run_program(steps, main, constants, arrays), program.meaning(*arrays), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=repr(program))


def put(name, source=None, place=0, other=1, adds=False):
    return Set(name, source or name, place, other, 2, adds)


SWAP = Assign(((X, Y), (Y, X)))
SAVE = Assign((("saved", X),))
CASES = {
    "an update under a branch": Carried((Repeat(4, (X,), (Choose("i", ((put(X),), (put(X, place=2),))),)),), (X,)),
    "a branch that returns the array as it is": Carried((Repeat(4, (X,), (Choose("i", ((), (put(X),))),)),), (X,)),
    "a branch that reads the old array after the update": Carried(
        (Repeat(4, (X, Y), (Choose("i", ((SAVE, put(X), put(Y, "saved", 1, 0)), ())),)),), (X, Y)
    ),
    "an old array that is combined after the update": Carried(
        (Repeat(3, (X, Y), (SAVE, put(X), Combine(Y, "saved", X, 2))),), (X, Y)
    ),
    "a branch that returns another state": Carried(
        (Repeat(4, (X, Y), (Choose("i", ((Assign(((X, Y),)),), (put(X),))), put(Y))),), (X, Y)
    ),
    "a branch that swaps": Carried((Repeat(4, (X, Y), (Choose(X, ((SWAP,), (put(X), put(Y)))),)),), (X, Y)),
    "states that swap": Carried((Repeat(3, (X, Y), (put(X), SWAP)),), (X, Y)),
    "three states that rotate": Carried(
        (Repeat(4, NAMES, (put(X), Assign(((X, Y), (Y, Z), (Z, X))))),), NAMES
    ),
    "an array that is read after the loop": Carried((Repeat(3, (X,), (put(X),)), SAVE), ("saved", X)),
    "the first state is a result": Carried((SAVE, Repeat(3, (X,), (put(X),))), ("saved", X)),
    "one first state of two": Carried((Assign(((Y, X),)), Repeat(3, (X, Y), (put(X), put(Y, X)))), (X, Y)),
    "the first state is a constant": Carried((Repeat(3, (Y,), (put(Y, X),)),), (Y, Y), (), (Y,)),
    "the first state is an argument": Carried((Repeat(3, (X,), (put(X),)),), (X,)),
    "a donated argument": Carried((Repeat(3, (X,), (put(X),)),), (X,), (0,)),
    "donated arguments that swap": Carried((SWAP,), (X, Y), (0, 1)),
    "donated arguments that swap in a loop": Carried((Repeat(3, (X, Y), (put(X), SWAP)),), (Y, X), (0, 1)),
    "a donated argument that is returned as it is": Carried((put(Y),), (X, Y), (0, 1)),
    "a donated state that no iteration changes": Carried((Repeat(3, (X, Y), (put(X, Y),)),), (Y, X), (0, 1)),
    "a donated argument that is read later": Carried((SAVE, put(X), put(Y, "saved")), (X, Y), (0, 1)),
    "loops in loops": Carried((Repeat(3, (X,), (Repeat(3, (X,), (put(X),)), put(X, place=3))),), (X,)),
    "loops in loops that swap": Carried((Repeat(3, (X, Y), (Repeat(2, (X, Y), (put(X), SWAP)), SWAP)),), (X, Y)),
    "a loop in a branch in a loop": Carried(
        (Repeat(4, (X, Y), (Choose("i", ((Repeat(2, (X,), (put(X, Y),)),), (put(Y),))),)),), (X, Y)
    ),
    "an inner loop reads what the outer one updates": Carried(
        (Repeat(4, (X, Y), (Repeat(2, (Y,), (put(Y, X),)), put(X, Y))),), (X, Y)
    ),
    "an early exit": Carried((Repeat(4, (X,), (Combine(X, X, X, 9), put(X)), X),), (X,)),
    "no iteration": Carried((Repeat(0, (X, Y), (put(X), SWAP)),), (X, Y), (0,)),
    "results that are one state": Carried((Repeat(3, (X,), (put(X),)),), (X, X, X), (0,)),
    "a choice of an update": Carried((Repeat(4, (X,), (Choose("i", ((put(X),), ()), True),)),), (X,)),
    "a choice between updates": Carried(
        (Repeat(4, (X,), (Choose("i", ((put(X),), (put(X, place=1),)), True),)),), (X,)
    ),
    "a choice between two updates and one": Carried(
        (Repeat(4, (X,), (Choose(X, ((put(X), put(X, place=4)), (put(X, place=1, adds=True),)), True),)),), (X,)
    ),
    "a choice that swaps": Carried(
        (Repeat(4, (X, Y), (put(X), Choose(X, ((SWAP,), ()), True), put(Y, X))),), (X, Y)
    ),
    "a choice that rotates three": Carried(
        (Repeat(4, NAMES, (put(X), Choose(X, ((Assign(((X, Y), (Y, Z), (Z, X))),), (SWAP,)), True))),), NAMES
    ),
    "a choice of another array": Carried(
        (Repeat(4, (X, Y), (put(X), Choose(X, ((Assign(((Y, X),)), put(Y)), (put(Y, X, 2),)), True))),), (X, Y)
    ),
    "a choice of an array from outside of the loop": Carried(
        (Repeat(4, (X, Y), (put(X), put(Y, X), Choose(Y, ((Assign(((X, Z),)),), ()), True))),), (X, Y)
    ),
    "a choice of two updates": Carried((Repeat(4, (X,), (Choose(X, ((put(X), put(X, place=4)), ()), True),)),), (X,)),
}  # fmt: skip


def unroll_small_arrays(monkeypatch):
    """Let no array be too small to unroll loops for, to exchange roles of buffers, or for a branch."""
    alternated, exchanged = (alternate_buffers, "ALTERNATED_BYTES"), (exchange_buffers, "EXCHANGED_BYTES")
    for module, begin in (alternated, exchanged, (array_passes, "BRANCHED_BYTES")):
        for name in (begin, f"{begin}_CUDA"):
            monkeypatch.setattr(module, name, replace(getattr(module, name), default=0))


@pytest.fixture(params=["kernels", "steps", "unrolled kernels", "unrolled steps"])
def loops(request, monkeypatch):
    """Let loops be one kernel each where they are small, or all steps of the host; unroll or exchange small states."""
    if "steps" in request.param:
        monkeypatch.setattr(Memories, "loop_flops", lambda *_: None)
    if "unrolled" in request.param:
        unroll_small_arrays(monkeypatch)


@pytest.mark.ir
@pytest.mark.parametrize("name", CASES)
def test_carried_buffers_match_numpy_at_every_level(name, loops):
    for level in range(4):
        check(CASES[name], level)


@pytest.mark.ir
@pytest.mark.parametrize("name", CASES)
def test_carried_buffers_match_numpy_on_simulated_gpus(name):
    check(CASES[name], 2, GPU)


@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
def test_carried_buffers_match_numpy_as_machine_code(name):
    """Guarded memory: what an access beyond an array touches ends the process."""
    program = CASES[name]
    arrays = arrays_for(program, SIZE)
    jitted = jax.jit(program.function(), donate_argnums=program.donated, keep_unused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = aotc.load(aotc.compile(jitted, *arrays, opt_level=2, guard=True))
    for how in ({}, {"donate": True}):
        given = [a.copy() for a in arrays]
        for got, want in zip(module.invoke("main", *given, **how), program.meaning(*arrays), strict=True):
            np.testing.assert_array_equal(got, want)
        assert how or all(map(np.array_equal, given, arrays))


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_driver.missing()), reason="no GPU")
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_carried_buffers_match_numpy_on_a_real_gpu(name, level):
    program = CASES[name]
    arrays = arrays_for(program, SIZE)
    jitted = jax.jit(program.function(), donate_argnums=program.donated, keep_unused=True)
    module = aotc.load(aotc.compile(jitted, *arrays, target="cuda:sm_90", opt_level=level), devices="cuda")
    for how in ({}, {"donate": True}):
        given = [a.copy() for a in arrays]
        for got, want in zip(module.invoke("main", *given, **how), program.meaning(*arrays), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.ir
def test_random_loops_match_numpy(loops):
    for seed in range(12):
        check(random_program(seed), seed % 4, seed=seed)


@pytest.mark.ir
def test_random_loops_match_numpy_on_simulated_gpus():
    for seed in range(12, 20):
        check(random_program(seed), seed % 4, GPU, seed)


@pytest.mark.slow
@pytest.mark.ir
@pytest.mark.parametrize("begin", range(20, 2020, 100))
def test_many_random_loops_match_numpy(begin, loops):
    for seed in range(begin, begin + 100):
        check(random_program(seed), seed % 4, CPU if seed % 3 else GPU, seed)


# ---------------------------------------------------------------- copies

BIG = np.zeros(1 << 16, np.float32)


def copies(function, *arguments, least=1 << 17, **options):
    """Return the copies of large arrays that a call makes, and how many kernels are loops."""
    _, program, _ = lowered(function, arguments, **options)
    steps = list(walk(program.steps))
    found = [s for s in steps if isinstance(s, Copy) and s.size >= least]
    return len(found), sum("_loop_" in s.kernel.name for s in steps if isinstance(s, Launch))


def branch(x):
    return lax.fori_loop(0, 9, lambda i, x: lax.cond(i % 3 == 0, lambda: x.at[i].set(x[i + 1]), lambda: x), x)


def nested(x):
    return lax.fori_loop(0, 9, lambda i, x: lax.fori_loop(0, 5, lambda j, x: x.at[i + j].add(x[j]), x), x)


def swapped_elements(x):
    """A sort's step: the second element is read after the first update in the program's order."""
    return lax.fori_loop(0, 9, lambda i, x: x.at[i].set(x[i + 1]).at[i + 1].set(x[i]), x)


def chosen(x):
    return lax.fori_loop(0, 9, lambda i, x: jnp.where(x[i] > 0, x.at[i].set(1), x), x)


def chosen_slice(x):
    return lax.fori_loop(0, 9, lambda i, x: jnp.where(i > 3, x, lax.dynamic_update_slice(x, x[:4] + 1, (i,))), x)


def either_element(x):
    return lax.fori_loop(0, 9, lambda i, x: jnp.where(x[i] > 0, x.at[i].set(1), x.at[i + 1].set(x[i + 2])), x)


def either_update(x):
    def step(i, x):
        return jnp.where(i % 2 == 0, x.at[i].add(1), x.at[i + 1].set(x[i]).at[i + 2].mul(3))

    return lax.fori_loop(0, 9, step, x)


def one_of_many(x):
    def step(i, x):
        return lax.select_n(i % 4, x.at[i].set(1), x, x.at[0].add(x[i]), x.at[i].set(x[i + 1] + 2))

    return lax.fori_loop(0, 9, step, x)


def moved_element(x):
    """An element is read before an update, and another one after it, for the same value."""

    def step(i, x):
        y = x.at[i].set(0)
        return y.at[i + 1].set(y[i + 1] * 2 + x[i])

    return lax.fori_loop(0, 9, step, x)


def union_find(x):
    def root(p, i):
        return lax.while_loop(lambda i: p[i] != i, lambda i: p[i].astype(int), i)

    return lax.fori_loop(0, 9, lambda i, p: p.at[root(p, i)].set(root(p, i + 1).astype("f")), x)


def while_of_branches(x):
    def step(s):
        i, x = s
        x = lax.switch(i % 3, [lambda: x.at[i].set(1), lambda: x, lambda: nested(x)])
        return i + 1, x

    return lax.while_loop(lambda s: (s[0] < 9) & (s[1][0] < 5), step, (0, x))[1]


IN_PLACE = [
    branch, nested, swapped_elements, chosen, chosen_slice, either_element, either_update, one_of_many, moved_element,
    union_find, while_of_branches,
]  # fmt: skip


@pytest.mark.ir
@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_a_donated_buffer_is_never_copied(function, loops):
    assert copies(function, BIG, donated=(0,))[0] == 0


@pytest.mark.ir
@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_a_donated_buffer_is_never_copied_on_a_gpu(function):
    assert copies(function, BIG, donated=(0,), target=GPU)[0] == 0


@pytest.mark.ir
@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_an_update_in_a_loop_is_fused_into_one_kernel(function):
    assert copies(function, BIG) == (0, 1)


def swapped_by_choice(a, b):
    def step(i, s):
        a, b = s[0].at[i].add(s[1][i + 1]), s[1]
        return jnp.where(a[i] > 0, b, a), jnp.where(a[i] > 0, a, b)

    return lax.fori_loop(0, 9, step, (a, b))


def best_of(a, b):
    step = lambda i, s: (jnp.where(s[0][i] > s[1][i], s[0], s[1]), s[1].at[i].add(s[0][i + 1]))
    return lax.fori_loop(0, 9, step, (a, b))


def reset(a, b):
    return lax.fori_loop(0, 9, lambda i, s: (jnp.where(s[0][i] > 5, 0, s[0].at[i].add(1)), s[1]), (a, b))


def computed_choice(a, b):
    return lax.fori_loop(0, 9, lambda i, s: (jnp.where(s[0][i] > 5, jnp.sin(s[0]), s[0]), s[1]), (a, b))


@pytest.mark.ir
@pytest.mark.parametrize("function", [swapped_by_choice, best_of, reset, computed_choice], ids=lambda f: f.__name__)
def test_a_select_between_states_becomes_a_branch(function):
    """A select would read and write whole arrays; a side that is computed for the choice alone needs no memory."""
    _, program, _ = lowered(function, (BIG, BIG))
    large = [s for s in walk(program.steps) if isinstance(s, Launch) and s.kernel.outputs[0].shape == BIG.shape]
    selects = [s for s in large if s.kernel.name.endswith("select")]
    assert bool(selects) == (function is computed_choice)


@pytest.mark.ir
def test_a_select_that_swaps_states_copies_nothing_in_the_loop():
    _, program, _ = lowered(swapped_by_choice, (BIG, BIG), donated=(0, 1))
    loops = [step for step in walk(program.steps) if isinstance(step, Loop)]
    assert not any(isinstance(s, Copy) and s.size == BIG.nbytes for loop in loops for s in walk(loop.body))


@pytest.mark.ir
def test_a_loop_that_must_copy_is_not_one_kernel():
    """The copy of a large array in each iteration is counted: memory is copied faster by commands."""

    def saves(x):
        return lax.fori_loop(0, 9, lambda i, s: (s[0].at[i].set(1), s[0]), (x, x))

    count, kernels = copies(saves, BIG)
    assert kernels == 0
    assert count >= 1


@pytest.mark.ir
def test_explain_states_the_reason_of_each_copy():
    _, program, _ = lowered(lambda x: (x.at[0].set(1), x), (BIG,))
    first, second = program.copies
    assert "(a result): %arg0 is an argument of the caller's" in first
    assert "(an update): %arg0 is an argument of the caller's" in second


def decoding_step(caches, x, w, at, layers=3):
    """A step of a decoder with stacked caches, as Llama's are."""
    keys, values = caches
    rows = jnp.arange(x.shape[0])
    for n in range(layers):
        keys = keys.at[n, rows, at].set(x @ w)
        values = values.at[n, rows, at].set(x * 2)
        scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, keys[n]))
        x = x + jnp.einsum("bs,bsd->bd", scores, values[n])
    return x, (keys, values)


@pytest.mark.ir
@pytest.mark.parametrize("target", [CPU, GPU])
def test_donated_caches_of_a_decoder_are_not_copied(target):
    caches = [np.zeros((3, 2, 64, 32), np.float32) for _ in range(2)]
    arguments = caches, np.ones((2, 32), "f"), np.ones((32, 32), "f"), np.zeros(2, np.int32)
    assert copies(decoding_step, *arguments, donated=(0,), target=target, least=caches[0].nbytes)[0] == 0
