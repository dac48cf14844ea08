"""The compiler processes, the cache and the linker."""

import stat
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from kernels.jobs.compilers import answers, build_library, quiet

from aotc.diagnostics import CallbackFailed, InternalError
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels import back_end
from aotc.kernels.cpu import build, find_linker, link
from aotc.kernels.cpu.build import build_executor
from aotc.kernels.cpu.compile import unoptimized_kernel_module
from aotc.kernels.jobs import cache, objects, pool, run
from aotc.kernels.jobs.run import OWN_TEXT, THREAD_TEXT
from aotc.kernels.worker import begin_kernel, target_fields, target_from
from aotc.options import Options
from aotc.targets import TARGETS, host_target
from aotc.vmfb.abi import IMPORT_PREFIX

pytestmark = pytest.mark.cpu

KERNEL = """def double(a: "f32[8]", /, o: "f32[8]", *, grid: "1", flops: "8", bytes: "64"):
    for i in range(0, 8):
        o[i] = a[i] + a[i]
"""
BROKEN = KERNEL.replace("a[i] + a[i]", "missing[i]")


CPUS = [target for target in TARGETS.values() if target.kind == "cpu"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilers():
    made = pool.CompilerPool()
    yield made
    made.close()


def request(text=KERNEL):
    return {"text": text, "target": target_fields(host_target())}


def test_a_target_survives_the_pipe():
    assert target_from(target_fields(host_target())) == host_target()


def test_one_worker_answers_many_requests(compilers):
    compilers.start_processes(1)
    counts = []
    texts = [KERNEL.replace("double", f"double{n}") for n in range(3)]
    objects = answers(compilers, [request(t) for t in texts], 1, counts.append)
    assert [o[:4] for o in objects] == [b"\x7fELF"] * 3
    assert counts == [1, 2, 3]
    assert answers(compilers, [request()], 1, quiet) == answers(compilers, [request()], 1, quiet)


def test_a_killed_worker_is_replaced(compilers):
    compilers.start_processes(1)
    (process,) = compilers._idle
    process.kill()
    process.wait()
    assert answers(compilers, [request()], 1, quiet)[0][:4] == b"\x7fELF"


def dying(spawned):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"], stdin=-1, stdout=-1)
    spawned.append(process)
    return process


def test_a_worker_that_dies_twice_is_an_error_of_the_caller(compilers, monkeypatch):
    spawned = []
    monkeypatch.setattr(pool, "_spawn_compiler_process", lambda: dying(spawned))
    with pytest.raises(InternalError, match=r"died twice .*\n.*def double"):
        answers(compilers, [request()], 1, quiet)
    assert len(spawned) == 2
    monkeypatch.undo()
    assert answers(compilers, [request()], 1, quiet)[0][:4] == b"\x7fELF"


def test_a_failure_of_any_kind_reaches_the_caller(compilers):
    def done(count):
        raise RuntimeError("the terminal is gone")

    with pytest.raises(InternalError, match="the terminal is gone"):
        answers(compilers, [request()], 1, done)


def test_a_kernel_that_does_not_compile_names_itself(compilers):
    with pytest.raises(InternalError, match=r"missing\[i\]"):
        answers(compilers, [request(BROKEN), request()], 2, quiet)
    assert answers(compilers, [request()], 1, quiet)[0][:4] == b"\x7fELF"


LARGE = KERNEL.replace("    for", f"    # {'long ' * OWN_TEXT}\n    for")
MIDDLE = KERNEL.replace("    for", f"    # {'x' * THREAD_TEXT}\n    for")


def test_a_few_small_kernels_are_compiled_here_to_the_same_bytes(compilers):
    counts = []
    texts = [KERNEL.replace("double", f"double{n}") for n in range(3)]
    here = answers(compilers, [request(t) for t in texts], 2, counts.append, begin_kernel)
    assert counts == [1, 2, 3]
    assert compilers._idle == []
    assert here == answers(compilers, [request(t) for t in texts], 2, quiet)
    assert len(compilers._idle) == 2


def test_this_process_helps_with_small_kernels_only(compilers):
    asked = []

    def here(request):
        asked.append(request["text"])
        return begin_kernel(request)

    objects = answers(compilers, [request(LARGE), *[request()] * 3], 2, quiet, here)
    assert [o[:4] for o in objects] == [b"\x7fELF"] * 4
    assert len(compilers._idle) == 1
    assert set(asked) <= {KERNEL}


def waiting(requests, here=True):
    return run.WaitingRequests(requests, here)


@pytest.mark.parametrize(
    ("texts", "jobs", "here", "want"),
    [
        ([KERNEL], 2, True, (0, 2)),  # one does other things while the caller compiles
        ([KERNEL], 2, False, (1, 0)),
        ([KERNEL] * 100, 1, True, (0, 1)),
        ([KERNEL] * 3, 4, True, (0, 2)),
        ([MIDDLE], 4, True, (0, 2)),
        ([MIDDLE] * 2, 2, True, (0, 2)),
        ([MIDDLE] * 2, 8, True, (0, 2)),  # no more threads than there is work for
        ([MIDDLE] * 20, 4, True, (0, 4)),
        ([LARGE], 1, True, (1, 0)),
        ([LARGE] * 2, 8, True, (2, 0)),
        ([LARGE, KERNEL], 4, True, (1, 2)),
        ([LARGE, KERNEL], 2, True, (1, 1)),
        ([LARGE, *[MIDDLE] * 9], 4, True, (1, 3)),
        ([*[LARGE] * 9, *[MIDDLE] * 9], 4, True, (3, 1)),
        ([LARGE, KERNEL], 1, True, (1, 0)),
    ],
)
def test_processes_and_threads_of_a_run(texts, jobs, here, want):
    assert waiting([request(t) for t in texts], here).worker_counts(jobs) == want


@pytest.mark.parametrize(
    ("jobs", "target", "want"),
    [(8, "cpu", []), (3, "cuda:sm_90a", [(3, "cuda")]), (3, "cpu,cuda:sm_90a", [(3, "cuda")])],
)
def test_which_processes_start_before_the_model_is_read(jobs, target, want, monkeypatch):
    asked = []
    monkeypatch.setattr(build.POOL, "start_processes", lambda *given: asked.append(given))
    build.start_workers(Options(jobs=jobs, target=target))
    assert asked == want


def test_only_kernels_for_cpus_are_compiled_here():
    gpu = {**request(), "target": target_fields(TARGETS["cuda:sm_90a"])}
    assert waiting([gpu]).worker_counts(2) == (1, 0)
    assert waiting([{"executor": True, "target": target_fields(host_target())}]).worker_counts(2) == (1, 0)
    assert not run._is_small_cpu_kernel(gpu)


def test_svml_of_the_user_does_not_change_kernels(own_cache, monkeypatch):
    """Intel's functions are for the process of the user: kernels are compiled in others, which do without."""
    given, answered = [], MagicMock(finish=lambda *_: [b""])
    monkeypatch.setattr(objects, "CompilerRun", lambda pool, requests, jobs, begin: given.append(begin) or answered)
    named = [objects.NamedKernels(KERNEL, host_target())]
    for svml in (False, True):
        monkeypatch.setattr(back_end, "config", SimpleNamespace(USING_SVML=svml))
        objects.compile_texts([request()], named, Options(cache=False))
    assert given == [begin_kernel, None]


def test_a_kernel_that_fails_in_a_thread_is_in_the_error(compilers):
    with pytest.raises(InternalError, match=r"missing\[i\]"):
        answers(compilers, [request(BROKEN), request()], 2, quiet, begin_kernel)


def test_a_callback_that_fails_here_comes_out(compilers):
    def done(count):
        raise CallbackFailed(KeyError("mine"))

    with pytest.raises(CallbackFailed):
        answers(compilers, [request()], 2, done, begin_kernel)


def test_the_shell_of_one_item_has_no_loop():
    one = parse_kernel(KERNEL)
    many = parse_kernel(
        KERNEL.replace("for i in range(0, 8)", "for p in parallel(0, 8)")
        .replace("[i]", "[p]")
        .replace('grid: "1"', 'grid: "8"')
    )
    loops = [str(unoptimized_kernel_module(k, host_target()).get_function("double")).count("phi") for k in (one, many)]
    assert loops == [0, 2]


def test_the_cache_keeps_objects(own_cache):
    kernel = parse_kernel(KERNEL)
    cold = build_library([kernel], host_target(), Options())
    files = [p for p in own_cache.rglob("*") if p.is_file()]
    assert files
    warm = build_library([kernel], host_target(), Options())
    assert warm == cold
    stamps = [p.stat().st_mtime_ns for p in files]
    assert build_library([kernel], host_target(), Options(cache=False)) == cold
    assert [p.stat().st_mtime_ns for p in files] == stamps


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("AOTC_CACHE_DIR", str(blocked / "below"))
    cache.write_cached_object("ab" * 32, b"data")
    assert cache.read_cached_object("ab" * 32) is None


def test_keys_depend_on_text_and_target():
    other = target_from([*target_fields(host_target())[:1], *target_fields(host_target())[1:]])
    assert cache.object_cache_key("a", host_target()) == cache.object_cache_key("a", other)
    assert cache.object_cache_key("a", host_target()) != cache.object_cache_key("b", host_target())


def test_equal_kernels_stand_twice_in_the_table():
    kernel = parse_kernel(KERNEL)
    library = build_library([kernel, kernel], host_target(), Options())
    assert [k.name for k in library.kernels] == ["double", "double"]
    assert link.undefined_symbols(library.data) <= link.ALLOWED_SYMBOLS | link.THREAD_SYMBOLS


def test_the_executor_is_compiled_and_linked_once(monkeypatch):
    monkeypatch.setattr(build, "_EXECUTORS", {})
    linked, plain = [], link.Linker.send_objects

    def send(self, objects):
        linked.append(len(objects))
        plain(self, objects)

    monkeypatch.setattr(link.Linker, "send_objects", send)
    first = build_library([parse_kernel(KERNEL)], host_target(), Options())
    executor = build_executor(host_target(), Options())
    assert sorted(linked) == [1, 2]  # the executor, and the kernel with its table
    asked, compiled = [], build.Compilation
    monkeypatch.setattr(build, "Compilation", lambda r, *rest: asked.extend(r) or compiled(r, *rest))
    assert build_library([parse_kernel(KERNEL)], host_target(), Options()) == first
    assert build_executor(host_target(), Options()) == executor
    assert sorted(linked) == [1, 2, 2]
    assert [r for r in asked if "text" not in r] == []


def test_the_executor_needs_only_known_symbols():
    assert (
        link.undefined_symbols(build_executor(host_target(), Options())) <= link.ALLOWED_SYMBOLS | link.THREAD_SYMBOLS
    )


def test_a_linker_that_fails_is_reported(tmp_path, monkeypatch):
    fake = tmp_path / "ld"
    fake.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(find_linker, "linker_command", lambda native: (str(fake),))
    with pytest.raises(InternalError, match="ld failed: no room"):
        link.link_shared_library([b""], host_target())


NUMBA_PROGRAM = """
import jax, numba, numpy as np
import aotc

def total(x):
    s = 0.0
    for v in x:
        s += np.exp(v)
    return s

x = np.arange(5.0)
before = numba.njit(total)(x)
module = aotc.load(aotc.compile(jax.jit(lambda a: a * 2.5), np.ones(3, "float32"), cache=False))
assert module.invoke("main", np.ones(3, "float32"))[0].tolist() == [2.5] * 3
assert numba.njit(total)(x) == before
assert abs(before - np.exp(x).sum()) < 1e-9
"""


def test_numba_of_the_user_works_before_and_after():
    """In a process of its own: tests of the code generator replace Numba's context in this one."""
    done = subprocess.run([sys.executable, "-c", NUMBA_PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_same_model_again_is_read_from_disk(own_cache, monkeypatch):
    """Only what took long is kept; options and the model's text are part of the key; the oldest go first."""
    import aotc
    from aotc import pipeline
    from aotc.driver import bundle_cache

    monkeypatch.setattr(pipeline, "WORTH_SECONDS", 0)
    monkeypatch.setattr(bundle_cache, "any_registered", lambda: False)  # what other tests registered is in no bundle
    text = (
        "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n"
        "%y = stablehlo.{} %x : tensor<4xf32>\nreturn %y : tensor<4xf32>\n}}"
    )
    first = aotc.compile(text.format("sine"))
    folder = own_cache / "bundles"
    (kept,) = folder.iterdir()
    assert bundle_cache.read_cached_bundle(kept.name) == first
    bundle_cache.write_cached_bundle(kept.name, b"seen")
    assert aotc.compile(text.format("sine")) == b"seen"
    assert aotc.compile(text.format("sine"), cache=False) == first
    assert aotc.compile(text.format("sine"), verify_each=True) == first
    assert aotc.compile(text.format("sine"), opt_level=0) != b"seen"
    assert aotc.compile(text.format("cosine")) != b"seen"
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setenv("AOTC_CACHE_LIMIT_MB", "0")
    aotc.compile(text.format("tanh"))
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setenv("AOTC_CACHE_LIMIT_MB", "many")
    with pytest.raises(aotc.CompileError, match="AOTC_CACHE_LIMIT_MB is 'many'"):
        aotc.compile(text.format("tanh"))


def test_bundles_that_compile_fast_are_not_cached(own_cache, monkeypatch):
    import aotc
    from aotc import pipeline

    monkeypatch.setattr(pipeline, "WORTH_SECONDS", 60)
    aotc.compile("func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    assert not (own_cache / "bundles").exists()


@pytest.mark.parametrize("target", CPUS, ids=lambda target: target.name)
def test_a_function_table_is_the_same_at_every_llvm_level(target, monkeypatch):
    """A module without functions has the same object at any level, and the lowest sets up the fewest passes."""
    arguments = ["a", "b", "a"], target, ["dgetrf", "mine"], {"mine"}, bytes(range(32))
    table = link.function_table_object(*arguments)
    monkeypatch.setattr(
        link, "emit_data", lambda text, target: back_end.parse_assembly_for_target(text, target).emit_native_object()
    )
    assert table == link.function_table_object(*arguments)


def test_a_table_knows_functions_of_any_name():
    table = link.function_table_object(["a"], host_target(), ['odd "name"', "b\\"], {'odd "name"'})
    assert all(f"\0{IMPORT_PREFIX}{name}\0".encode() in table for name in ('odd "name"', "b\\"))
