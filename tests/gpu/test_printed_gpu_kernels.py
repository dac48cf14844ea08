"""Printed kernels for GPUs: they compile for each GPU, and compute what the loop IR's interpreter does.

Without a GPU their numbers are those of the simulator: numba's CPU compiler reads the functions.
"""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba_cuda")
from support.small_models import array, close
from typer.testing import CliRunner

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cuda.shared_memory import dynamic_shared_bytes
from aotc.kernels.numba_front.compile import function_from_text
from aotc.kernels.numba_front.gpu_compile import compile_kernel
from aotc.kernels.numba_front.gpu_source import gpu_source
from aotc.kernels.numba_front.gpu_trial import call_simulated
from aotc.kernels.numba_front.module_text import module_text, template_tiles
from aotc.kernels.numba_front.trial import NoTrial, output_difference, random_arguments
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.dtypes import to_numpy
from aotc_cli.main import app

pytestmark = pytest.mark.cudasim

TARGET = "cuda:sm_90a"
HALVES = array(8, 64).astype(jnp.bfloat16)


def segments(x, n):
    """Sums of elements that many items of the grid add to, and the largest of each."""
    return jax.ops.segment_sum(n, n % 5, 5), jax.ops.segment_max(n, n % 5, 5), x[n % 8]


def counted(n, x, w):
    return jax.lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ w) + i, x)


def functions(x, n):
    """Elements of all families of ops."""
    k = n.astype("int8")
    return (
        jnp.tanh(x) + jnp.exp(x) * jax.lax.erf(x), jnp.floor(x * 3) % 2.5, n // 3, n % 3, n << 2, k * k,
        (n.astype("uint32") - 1) // 7, x.astype(jnp.float16) / 3, x.astype(jnp.float8_e4m3fn).astype("float32"),
        jax.lax.complex(x, -x) * (1 + 2j), jnp.abs(jax.lax.complex(x, x)), x > 0, jnp.where(x > 0, x, 0),
        jax.lax.bitcast_convert_type(x, jnp.uint32) ^ 5, jax.lax.population_count(n),
    )  # fmt: skip


N = np.random.default_rng(1).integers(-50, 50, (8, 64)).astype(np.int32)
PROGRAMS = {
    "functions": (functions, array(8, 64), N),
    "long rows": (lambda x: jax.nn.softmax(x), array(3, 3000)),
    "rows in shared memory": (lambda x: jax.nn.softmax(x), array(2, 16384)),
    "rows of halves": (lambda x: jax.nn.softmax(x) + x.sum(0), HALVES),
    "sums of complex numbers": (lambda x: jax.lax.complex(x, x * 2).sum(1), array(8, 64)),
    "products of small integers": (lambda n: n.astype("int8").prod(1), N),
    "any": (lambda x: (x > 2).any(1), array(8, 64)),
    "argmax": (lambda x: x.argmax(1), array(8, 600)),
    "sorted rows": (lambda x: jnp.sort(x, 1), array(2, 300)),
    "sorted by digits": (lambda x: jnp.sort(x), array(20000)),
    "largest": (lambda x: jax.lax.top_k(x, 5), array(4, 200)),
    "segments": (segments, array(8, 64), np.abs(N[0])),
    "transposed": (lambda x: x.T + 1, array(70, 130)),
    "cumulative": (lambda x: jnp.cumsum(x, 1), array(3, 500)),
    "loop": (counted, np.int32(3), array(2, 12), array(12, 12, seed=1)),
    "matmul": (lambda x, y: x @ y, array(5, 7), array(7, 3)),
    "fourier": (lambda x: jnp.fft.fft(x), array(3, 16)),
}
QUICK = ("functions", "rows of halves", "sums of complex numbers", "products of small integers", "segments", "loop")


def kernels_of(data):
    """The loop kernels of a bundle's GPU code."""
    rows = open_bundle(data).manifest["debug"]["kernels"]
    found = [parse_kernel(row["text"]) for key, row in rows.items() if key.startswith("cuda")]
    return [k for k in found if k.tiling is None]


def compiled(name, target=TARGET, **options):
    function, *arguments = PROGRAMS[name]
    return aotc.compile(jax.jit(function), *arguments, target=target, **options)


def typed(kernel, arguments):
    buffers = (*kernel.inputs, *kernel.outputs)
    return [
        a.view(to_numpy(b.dtype)).reshape(a.shape if b.shape else ())
        for a, b in zip(arguments.arrays, buffers, strict=True)
    ]


def check_simulated(kernel, target):
    """Compare a printed kernel with the interpreter."""
    try:
        arguments = random_arguments(kernel)
    except NoTrial:
        return
    expected, found = arguments.copied(), arguments.copied()
    run_kernel(kernel, typed(kernel, expected), dict(zip(kernel.dims, arguments.dims)))
    function = function_from_text(gpu_source(kernel, target).module, kernel.name)
    call_simulated(function, kernel, target, found)
    problem = output_difference(kernel, expected, found)
    assert not problem, f"{kernel.name}: {problem}"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS])
def test_numbers_in_the_simulator(name):
    for kernel in kernels_of(compiled(name)):
        check_simulated(kernel, TARGETS[TARGET])


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "cuda:compute_80"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS])
def test_kernels_compile(name, target):
    if name in QUICK and target != TARGET and name != "functions":
        pytest.skip("one program for all targets is enough of the quick ones")
    for kernel in kernels_of(compiled(name, target)):
        assert compile_kernel(kernel, TARGETS[target]).data


WORDS = {
    "exchanges": """def exchanges(x: "{0}[64]", /, o: "{0}[64]", *, grid: "1"):
    a = private("{0}[64]")
    b = private("{0}[64]")
    for t in thread(0, 64):
        a[t] = x[t]
    shuffle(b, a, mask=5)
    for t in thread(0, 64):
        o[t] = b[t]
""",
    "matches": """def matches(x: "u32[64]", /, o: "u32[64]", *, grid: "1"):
    a = private("u32[64]")
    b = private("u32[64]")
    for t in thread(0, 64):
        a[t] = x[t]
    match(b, a, bits=3)
    for t in thread(0, 64):
        o[t] = b[t]
""",
    "shared": """def shared_rows(x: "f32[2, 16384]", /, o: "f32[2, 16384]", *, grid: "2"):
    for i in parallel(0, 2):
        first = shared("f32[16384]")
        second = shared("f32[64]")
        for t in thread(0, 64):
            second[t] = x[i, t]
            for k in range(0, 256):
                first[t + 64*k] = x[i, t + 64*k]
        barrier()
        for t in thread(0, 64):
            for k in range(0, 256):
                o[i, t + 64*k] = first[-t - 64*k + 16383] + second[63 - t]
""",
    "grid": """def whole_grid(x: "f32[8, 32]", /, o: "f32[8, 32]", counter: "u32[]", *, grid: "1"):
    for b in blocks(0, 8):
        for t in thread(0, 32):
            o[b, t] = x[b, t] * f32(2.0)
    grid_barrier(counter)
    for b in blocks(0, 8):
        for t in thread(0, 32):
            if index(t, dtype="i64") < i64(16):
                o[b, t] = o[-b + 7, t + 16] + f32(1.0)
""",
    "atomic": """def atomics(x: "i32[200]", /, o: "i32[4]", most: "i64[4]", *, grid: "200"):
    for i in parallel(0, 200):
        o[(i % 4)] = atomic_add(o[(i % 4)], x[i])
        most[(i % 4)] = atomic_max(most[(i % 4)], convert(x[i], "i64"))
""",
}
EXCHANGED = ("i1", "u8", "i16", "bf16", "i32", "u32", "f32", "i64", "u64", "f64", "c64", "c128")
WRITTEN = {
    **{name: text for name, text in WORDS.items() if name != "exchanges"},
    **{f"exchanges of {dtype}": WORDS["exchanges"].format(dtype) for dtype in EXCHANGED},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_words_of_a_block(name):
    """Barriers, exchanges, shared memory and atomic operations."""
    kernel, target = parse_kernel(WRITTEN[name]), TARGETS["cuda:sm_80"]
    check_simulated(kernel, target)
    assert compile_kernel(kernel, target).data
    assert bool(dynamic_shared_bytes(kernel, target)) == (name == "shared")


def test_the_text_of_a_block_of_threads():
    text = gpu_source(parse_kernel(WRITTEN["shared"]), TARGETS["cuda:sm_80"]).text
    assert text == """def shared_rows(x: "f32[2, 16384]", o: "f32[2, 16384]", items):
    i = i64(cuda.blockIdx.x)
    shared_memory = cuda.shared.array(0, u8)  # its size is a parameter of the launch
    first = scratch_at(shared_memory, 0, (16384,), f32)
    second = scratch_at(shared_memory, 65536, (64,), f32)
    t = i64(cuda.threadIdx.x)
    second[t] = x[i, t]
    for k in range(0, 256):
        first[64*k + t] = x[i, 64*k + t]
    cuda.syncthreads()
    t = i64(cuda.threadIdx.x)
    for k in range(0, 256):
        o[i, 64*k + t] = first[-64*k - t + 16383] + second[-t + 63]
"""


def product(x, w):
    return jax.nn.gelu(x @ w)


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def attention(q):
    return jax.nn.dot_product_attention(q, q, q)


OF_TEMPLATES = {
    "product": (product, jnp.zeros((128, 256), "bfloat16"), jnp.zeros((256, 128), "bfloat16")),
    "product of f32": (product, jnp.zeros((128, 256)), jnp.zeros((256, 128))),
    "convolution": (convolution, jnp.zeros((2, 16, 16, 64), "bfloat16"), jnp.zeros((3, 3, 64, 64), "bfloat16")),
    "attention": (attention, jnp.zeros((1, 256, 4, 64), "bfloat16")),
}


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_a_template_prints_its_call(name, target):
    function, *arguments = OF_TEMPLATES[name]
    data = aotc.compile(jax.jit(function), *arguments, target=target)
    rows = open_bundle(data).manifest["debug"]["kernels"].values()
    kernels = [k for k in (parse_kernel(row["text"]) for row in rows) if k.tiling is not None]
    assert kernels
    scope = {"__name__": "printed"}
    exec(module_text([(k, TARGETS[target], "") for k in kernels], "m.vmfb"), scope)
    for kernel in kernels:
        assert scope[kernel.name].tiles == template_tiles(kernel)
        assert scope[kernel.name].py_func.__name__ == kernel.name


@pytest.fixture(scope="module")
def kernels_file(tmp_path_factory):
    """The printed kernels of a program with kernels of each shape, for GPUs from sm_80 on."""
    folder = tmp_path_factory.mktemp("printed")

    def model(x, w):
        return jax.nn.softmax(x @ w), jnp.tanh(x[:, ::-1])

    x, w = jnp.zeros((64, 128), "bfloat16"), jnp.zeros((128, 256), "bfloat16")
    aotc.compile(jax.jit(model), x, w, target="cuda:compute_80").save(folder / "m.vmfb")
    done = CliRunner().invoke(app, ["dump", str(folder / "m.vmfb"), "--kernels", "-o", str(folder / "k.py")])
    assert done.exit_code == 0, done.output
    return folder / "k.py"


def _run(path):
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)


def test_without_a_gpu_the_file_compiles_its_kernels(kernels_file):
    if not driver.missing():
        pytest.skip("this machine has a GPU")
    text = kernels_file.read_text()
    assert "@template(WarpTiles(" in text
    assert "@cuda.jit\ndef " in text
    done = _run(kernels_file)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(re.findall(r"^def ", text, re.MULTILINE)) >= 3
    assert all(re.search("not run: (it compiles for cuda:compute_80|a template .*); no NVIDIA", line) for line in lines)


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
def test_the_file_checks_its_kernels_on_a_gpu(kernels_file):
    done = _run(kernels_file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.endswith(": agrees") for line in done.stdout.splitlines()), done.stdout
    edited = kernels_file.with_name("edited.py")
    edited.write_text(kernels_file.read_text().replace("f32(exp(", "f32(exp(0.5 * "))
    done = _run(edited)
    assert done.returncode == 1
    assert "elements differ, the first at" in done.stdout


@pytest.mark.parametrize("name", ["functions", "product"])
def test_a_bundle_of_printed_kernels(name):
    """Loop kernels are compiled from their text; the kernels of templates are the same as by default."""
    function, *arguments = (PROGRAMS | OF_TEMPLATES)[name]
    usual, own = (
        open_bundle(aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a", kernel_compiler=by))
        for by in ("direct", "numba")
    )
    texts = usual.manifest["debug"]["kernels"]
    (one,), (other,) = usual.manifest["variants"], own.manifest["variants"]
    first, second = bytes(usual.segment(one["cubin"])), bytes(own.segment(other["cubin"]))
    for a, b in zip(one["kernels"], other["kernels"], strict=True):
        (begin, size), (at, count) = a["image"], b["image"]
        of_template = parse_kernel(texts[f"cuda:sm_90a/{a['name']}"]["text"]).tiling is not None
        assert (first[begin : begin + size] == second[at : at + count]) == of_template


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bundle_of_printed_kernels_on_a_gpu(name):
    function, *arguments = PROGRAMS[name]
    module = aotc.load(compiled(name, "cuda:compute_80", kernel_compiler="numba"))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.tree.leaves(jax.jit(function)(*arguments))
    # A unit of f16 in "functions": the exponential function of the CPU has other last bits.
    close(module.invoke("main", *arguments), expected, {"rows of halves": 1e-2, "functions": 1e-3}.get(name, 1e-5))


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_the_file_checks_templates_on_a_gpu(name, tmp_path):
    function, *arguments = OF_TEMPLATES[name]
    aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a").save(tmp_path / "m.vmfb")
    CliRunner().invoke(app, ["dump", str(tmp_path / "m.vmfb"), "--kernels", "-o", str(tmp_path / "k.py")])
    done = _run(tmp_path / "k.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.endswith(": agrees") for line in done.stdout.splitlines()), done.stdout


ROWS = jax.jit(lambda x: jnp.tanh(x) * 2), array(40, 70)


def replaced(edit, target="cuda:sm_80"):
    """Compile a program whose only kernel is its printed text after ``edit``; return the images with and without."""
    model, x = ROWS
    data = aotc.compile(model, x, target=target)
    (kernel,), usual = kernels_of(data), open_bundle(data)
    module = gpu_source(kernel, TARGETS[target]).module
    own = open_bundle(aotc.compile(model, x, target=target, replace={kernel.name: edit(module)}))
    return [bytes(b.segment(b.manifest["variants"][0]["cubin"])) for b in (usual, own)]


def test_a_replaced_kernel_is_compiled_into_the_bundle():
    edit = lambda text: text.replace("f32(tanh(", "f32(tanh(f32(1.0) * ").replace("def k", "@cuda.jit\ndef k")
    usual, own = replaced(edit)
    assert usual != own


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda text: text.replace("tanh(", "tanh(f32(0.5) * "), "on random arguments, o0: .* elements differ"),
        (lambda text: text.replace("tanh(", "arcsine("), "it does not run in the simulator: .*"),
        (lambda text: text.replace("if p < items:", "if p <= items:"), "it accesses an element outside of an array"),
        (lambda text: text.replace("def k", "def other_k"), "does not define"),
    ],
)
def test_a_replacement_that_is_refused(edit, reason):
    with pytest.raises(aotc.CompileError, match=f"(?s)the function cannot replace kernel k0_.*: .*({reason})"):
        replaced(edit)


def test_a_template_is_not_replaced():
    function, *arguments = OF_TEMPLATES["product"]
    with pytest.raises(aotc.CompileError, match="kernel k0_matmul cannot be replaced: a template for tensor cores"):
        aotc.compile(jax.jit(function), *arguments, target="cuda:sm_80", replace={"k0_matmul": "\n"})


def test_a_large_launch_is_tried_in_part(monkeypatch):
    from aotc.kernels.numba_front import gpu_trial

    monkeypatch.setattr(gpu_trial, "MOST_THREADS", 512)
    with pytest.raises(aotc.CompileError, match="elements differ"):
        replaced(lambda text: text.replace("tanh(", "tanh(f32(0.5) * "))
    replaced(lambda text: text)


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
def test_a_replaced_kernel_on_a_gpu():
    model, x = ROWS
    (kernel,) = kernels_of(aotc.compile(model, x, target="cuda:compute_80"))
    module = gpu_source(kernel, TARGETS["cuda:compute_80"]).module
    own = aotc.compile(model, x, target="cuda:compute_80", replace={kernel.name: module})
    np.testing.assert_allclose(aotc.load(own)(x), np.tanh(x) * 2, rtol=1e-5)
