"""NaN and infinity found, calls that fail kept, kernels with names for profilers, memory over time."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.vmfb.errors import CallError
from aotc.vmfb.profile.finite_watch import first_non_finite, run_with_finite_watch
from aotc_cli.main import app

pytestmark = pytest.mark.cpu
X = np.linspace(0.5, 2, 16 * 16, dtype=np.float32).reshape(16, 16)


def steps(x):
    y = jnp.tanh(x @ x)
    z = jnp.log(y - 2)  # NaN
    return jnp.sort(z, 1), y


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("watch") / "m.vmfb"
    path.write_bytes(aotc.compile(steps, X, opt_level=0))
    return path


def run(*words):
    return CliRunner().invoke(app, ["run", *map(str, words)])


def test_the_first_nan_is_named_with_its_line(bundle):
    module = aotc.load(bundle)
    results, found = run_with_finite_watch(module.get_function("main"), [X])
    for got, want in zip(results, module.invoke("main", X), strict=True):
        np.testing.assert_array_equal(got, want)
    (odd,) = found
    assert (odd.value, odd.elements) == ("nan", X.size)
    assert "log" in odd.kernel
    assert "jit(steps)/log at " in odd.loc
    assert "test_watching.py" in odd.loc


def test_nan_in_an_argument_is_reported_as_the_arguments(bundle):
    x = X.copy()
    x[3, 4] = np.nan
    _, found = run_with_finite_watch(aotc.load(aotc.compile(lambda x: jnp.sin(x) + 1, X)).get_function("main"), [x])
    assert [(o.step, o.array, o.at) for o in found] == [(-1, "argument 0", (3, 4))]
    assert str(found[0]) == "argument 0[3, 4] is nan"


def test_infinity_and_the_nan_that_comes_of_it():
    module = aotc.load(aotc.compile(lambda x: ((x / 0.0), (x / 0.0) * 0.0), X, opt_level=0))
    _, found = run_with_finite_watch(module.get_function("main"), [X])
    assert sorted(o.value for o in found) == ["inf", "nan"]
    _, found = run_with_finite_watch(aotc.load(aotc.compile(lambda x: x * 2, X)).get_function("main"), [X])
    assert found == []


def test_nan_in_a_donated_cache_is_reported_as_the_arguments():
    def write(cache, x):
        return jax.lax.dynamic_update_slice(cache, jnp.log(x)[None], (1, 0))

    module = aotc.load(aotc.compile(jax.jit(write, donate_argnums=0), X, X[0]))
    cache = X.copy()
    cache[5, 5] = np.nan
    (odd,) = run_with_finite_watch(module.get_function("main"), [cache, X[0]])[1]
    assert (odd.step, odd.array, odd.at) == (-1, "argument 0", (5, 5))
    odd = run_with_finite_watch(module.get_function("main"), [cache, -X[0]])[1][1]
    assert (odd.value, odd.step, odd.at, odd.elements) == ("nan", 0, (1, 0), 16)
    transposed = np.roll(cache, 1, 0)
    assert first_non_finite(transposed, "f32", cache) is None
    transposed[0, 0] = -np.inf
    assert first_non_finite(transposed, "f32", cache) == ("-inf", (0, 0), 1)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64", "c64"])
def test_values_of_every_type(dtype):
    from aotc.vmfb.dtypes import to_numpy

    x = np.zeros((2, 3), to_numpy(dtype))
    assert first_non_finite(x, dtype) is None
    x[1, 2] = np.inf
    assert first_non_finite(x, dtype) == ("inf", (1, 2), 1)
    x[0, 1] = np.nan
    assert first_non_finite(x, dtype) == ("nan", (0, 1), 2)
    assert first_non_finite(np.zeros(3, np.int32), "i32") is None
    if dtype != "c64":
        x[:] = -np.inf
        assert first_non_finite(x, dtype)[0] == "-inf"


def test_run_says_where_and_exits_with_3(bundle):
    done = run(bundle, "--random", "--nan-watch", "--repeat=2")
    assert done.exit_code == 3
    assert re.search(r"dispatch \d+, \w+.*, computes nan: ", done.stderr)
    clean = bundle.parent / "clean.vmfb"
    clean.write_bytes(aotc.compile(jnp.sin, X))
    done = run(clean, "--zeros", "--nan-watch")
    assert done.exit_code == 0
    assert "no kernel computes NaN or infinity" in done.stderr


def test_a_call_that_ends_the_process_leaves_what_repeats_it(tmp_path):
    """A function of the user's that ends the process stands for a kernel that crashes."""
    text = """func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.custom_call @fatal(%x) : (tensor<4xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32> }"""
    (tmp_path / "calls.py").write_text(
        "import os, aotc\n\ndef fatal(x, out):\n    os.abort()\n\n"
        "aotc.register_custom_call('fatal', fatal, native=False)\n"
    )
    aotc.register_custom_call("fatal", lambda x, out: None, native=False)
    (tmp_path / "m.vmfb").write_bytes(aotc.compile(text))
    command = [sys.executable, "-c", "import sys; from aotc_cli.main import main; main()", "run"]
    words = ["m.vmfb", "--input=4xf32=1,2,3,4", "--custom-calls=calls.py", "--reproducer=kept"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode < 0
    kept = tmp_path / "kept"
    assert sorted(p.name for p in kept.iterdir()) == ["input0.npy", "model.vmfb", "run.sh"]
    np.testing.assert_array_equal(np.load(kept / "input0.npy"), np.float32([1, 2, 3, 4]))
    assert "--function=main --input=@input0.npy" in (kept / "run.sh").read_text()


def test_a_call_that_ends_well_leaves_nothing_and_no_folder_is_overwritten(bundle, tmp_path):
    assert run(bundle, "--random", f"--reproducer={tmp_path / 'kept'}").exit_code == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("mine")
    done = run(bundle, "--random", f"--reproducer={tmp_path}")
    assert isinstance(done.exception, CallError)
    assert "is not empty" in str(done.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


NAMED = """
import sys, aotc, numpy as np
module = aotc.load(sys.argv[1], threads=1)
print(module._executable._library.path)
x = np.load(sys.argv[2])
np.save(sys.argv[3], module.invoke("main", x)[1])
"""


def test_profilers_see_the_names_of_kernels(bundle, tmp_path):
    np.save(tmp_path / "x.npy", X)
    folder = tmp_path / "perf"
    words = [sys.executable, "-c", NAMED, str(bundle), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    environment = {**os.environ, "AOTC_PERF": str(folder)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    path = done.stdout.strip()
    assert os.path.dirname(path) == str(folder)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), aotc.load(bundle).invoke("main", X)[1])
    names = {t.name for t in aotc.load(bundle)._executable.kernel_texts()}
    assert all(name.encode() + b"\0" in Path(path).read_bytes() for name in names)
    if nm := shutil.which("nm"):
        for flags in ((), ("-D",)):
            listed = subprocess.run([nm, *flags, path], capture_output=True, text=True, check=True).stdout
            assert {line.split()[-1] for line in listed.splitlines()} >= names


def test_without_a_place_for_the_file_kernels_run_all_the_same(bundle, tmp_path):
    (tmp_path / "file").write_text("")
    script = "import sys, aotc; print(len(aotc.load(sys.argv[1]).functions))"
    words = [sys.executable, "-c", script, str(bundle)]
    environment = {**os.environ, "AOTC_PERF": str(tmp_path / "file" / "no")}
    assert subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout == "1\n"


def test_a_trace_has_the_memory_over_time(tmp_path):
    (tmp_path / "m.vmfb").write_bytes(aotc.compile(lambda x: jnp.sort(jax.nn.softmax(x @ x, 1), 1) @ x, X))
    out = tmp_path / "t.json"
    done = CliRunner().invoke(
        app, ["profile", str(tmp_path / "m.vmfb"), "-q", "--repeat=1", "--calls=2", "-o", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "C"]
    sizes = [e["args"]["bytes"] for e in rows]
    assert max(sizes) >= X.nbytes
    assert sizes[-1] == 0
    assert [e["ts"] for e in rows] == sorted(e["ts"] for e in rows)
