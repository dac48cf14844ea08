"""What ``aotc lint`` says of a model is what ``aotc compile`` does with it: every op, refusal, option and target.

Compilation runs up to machine code, of which only the user's own functions are refused (``test_lint.py``).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz.modules import mutant
from jax import export
from jax.experimental import checkify, io_callback
from support.checklists.checklist import module
from support.checklists.checklist_all import CASES
from support.halves import half_of_pairs

import aotc
from aotc import CompileError, pipeline
from aotc.targets import TARGETS
from aotc.tools.lint import lint
from aotc.vmfb import custom_calls

pytestmark = pytest.mark.cpu

BOTH = "cpu,cuda:sm_90"
MUTANTS, ALL_MUTANTS = range(300), range(300, 6000)


@pytest.fixture
def machine_code(monkeypatch):
    """None is made."""
    monkeypatch.setattr(pipeline, "assemble", lambda *given: b"")
    monkeypatch.setattr(pipeline, "check_bundle", lambda data: None)
    monkeypatch.setattr(pipeline, "start_workers", lambda *given: None)


def refused_by_compile(model, *args, **options):
    try:
        aotc.compile(model, *args, cache=False, **options)
    except CompileError as error:
        return {f.message for f in error.findings}
    return set()


def refused_by_lint(model, *args, **options):
    try:
        reports = lint(model, *args, cache=False, **options)
    except CompileError as error:
        return {f.message for f in error.findings}
    for report in reports:
        assert report.compiles == (not any(row.status in ("refused", "waits") for row in report.rows)) or any(
            not op for op, _ in report.refusals
        ), report
    return {f.message for report in reports for _, f in report.refusals}


def agree(model, *args, **options):
    """Compare the verdicts; lint may find more than the first stage that compilation stops at."""
    found, told = refused_by_compile(model, *args, **options), refused_by_lint(model, *args, **options)
    assert found <= told, (found, told)
    assert bool(found) == bool(told), told
    return bool(found)


ROWS = [pytest.param(name, slice(0, 1), id=name) for name in CASES]
ROWS += [pytest.param(name, slice(1, None), id=f"{name} more", marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize(("name", "part"), ROWS)
def test_lint_agrees_with_compile_for_every_op(name, part, machine_code):
    for row in CASES[name][part]:
        text = module(*row)
        for target in BOTH.split(","):
            agree(text, target=target)


@pytest.mark.parametrize("numbers", [MUTANTS, pytest.param(ALL_MUTANTS, marks=pytest.mark.slow)], ids=["few", "many"])
def test_lint_agrees_with_compile_for_faulty_modules(numbers, machine_code):
    verdicts = [agree(mutant(n), target=("cpu", "cuda:sm_90")[n % 2], opt_level=n % 4) for n in numbers]
    assert 0.1 < np.mean(verdicts) < 0.99


ANY = jax.ShapeDtypeStruct((3, 3), "float32")
SYMBOLIC = export.export(jax.jit(lambda x: jnp.sort(x, 0).sum(1)))(
    jax.ShapeDtypeStruct(export.symbolic_shape("b, 2*b"), "float32")
)
PLATFORMS = export.export(
    jax.jit(lambda x: jax.lax.platform_dependent(x, cpu=jnp.linalg.inv, cuda=jnp.sin)),
    platforms=["cpu", "cuda"],
)(ANY)


def printed(x):
    jax.debug.print("{}", x)
    return x + 1


def noted(x):
    io_callback(print, None, x, ordered=False)
    return x


def ordered(x):
    jax.debug.print("{}", x, ordered=True)
    return x


def checked(x):
    checkify.check(x.sum() > 0, "not positive")
    return x


def raises(x):
    raise ValueError("mine")


PROGRAMS = {
    "printed": (printed, ANY),
    "noted": (noted, ANY),
    "ordered": (ordered, ANY),
    "checked": (checked, ANY),
    "called back": (lambda x: jax.pure_callback(np.sin, ANY, x), ANY),
    "called back for nothing": (lambda x: (jax.pure_callback(np.sin, ANY, x), x)[1], ANY),
    "raises": (raises, ANY),
    "library": (lambda x: jnp.linalg.svd(x), ANY),
    "symbolic": (SYMBOLIC,),
    "platforms": (PLATFORMS,),
    "no model": ("func.func private @f() { return }",),
    "no text": (b"",),
    "large": ("func.func @main(%x: tensor<100000000000x100000000000xf32>) -> tensor<f32> {\n"
              "%0 = stablehlo.constant dense<0.0> : tensor<f32>\nreturn %0 : tensor<f32>\n}",),
    "recursive": ("func.func @main(%x: tensor<f32>) -> tensor<f32> {\n%0 = func.call @f(%x) : (tensor<f32>) -> "
                  "tensor<f32>\nreturn %0 : tensor<f32>\n}\nfunc.func private @f(%x: tensor<f32>) -> tensor<f32> {\n"
                  "%0 = func.call @f(%x) : (tensor<f32>) -> tensor<f32>\nreturn %0 : tensor<f32>\n}",),
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "drop": {"callbacks": "drop"},
    "neither": {"callbacks": "keep"},
    "sizes": {"specialize": {"b": (1, 8)}},
    "sizes of nothing": {"specialize": {"nobody": (1,)}},
    "wrong sizes": {"specialize": {"b": (-1,)}},
    "level 0": {"opt_level": 0},
    "level 3": {"opt_level": 3},
    "required passes": {"bisect": 0},
    "a file of weights": {"weights": "w.txt"},
    "no transfers": {"max_transfers": 0},
    "a device": {"devices": {"d0": "cpu"}, "default_device": "d0"},
    "an unknown device": {"devices": {"d0": "gpu"}},
    "bound": {"bind": (0,)},
    "nothing bound": {"bind": ("nobody",)},
    "a precision": {"matmul_precision": "bf16x3"},
    "no precision": {"matmul_precision": "tf32"},
    "few bits": {"quantize_weights": "int4:64"},
    "too few bits": {"quantize_weights": "int1"},
    "no memory": {"memory_limit": 1},
    "little memory": {"stack_limit": 256, "shared_memory_limit": 256},
    "half way": {"stop_after": "inline"},
    "unknown": {"nothing": 1},
}


@pytest.mark.filterwarnings("ignore:.*is left out:UserWarning")
@pytest.mark.parametrize(("name", "options"), half_of_pairs(PROGRAMS, OPTIONS))
def test_lint_agrees_with_compile_for_every_option(name, options, machine_code, monkeypatch):
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    for target in (*BOTH.split(","), BOTH):
        agree(*PROGRAMS[name], target=target, **OPTIONS[options])


@pytest.mark.parametrize("target", [*TARGETS, "cpu:none", "cpu,cpu:x86-64-v2", "", ","])
@pytest.mark.parametrize("name", ["library", "symbolic", "platforms"])
def test_lint_agrees_with_compile_for_every_target(name, target, machine_code):
    agree(*PROGRAMS[name], target=target)


def test_lint_has_the_code_options_of_compile():
    """Lint lacks those that say what is written where, what stays between calls, how much is printed, what is timed."""
    from aotc_cli.commands import compile as compile_command
    from aotc_cli.commands import lint as lint_command

    def options(command):
        return {n for n, given in command.command.__annotations__.items() if n not in ("return", "context")}

    only_files = {"output", "weights", "state", "debug_info", "keep_source", "cache", "jobs", "quiet"}
    only_files |= {"timings", "costs", "tuning", "reproducer", "about", "mesh"}
    only_debugging = {"dump_ir", "print_after", "stop_after", "verify_each", "bisect"}
    only_debugging |= {"annotate_affinities"}
    only_kernels = {"kernel", "kernel_compiler"}
    assert options(compile_command) - options(lint_command) == only_files | only_debugging | only_kernels
