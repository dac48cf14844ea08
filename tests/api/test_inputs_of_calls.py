"""What callers have: arrays of other libraries, integers of 64 bits, other processes, python -m aotc."""

import pickle
import subprocess
import sys
from importlib import resources
from multiprocessing import get_context

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import aotc
from aotc import CallError
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.dlpack import make_capsule

pytestmark = pytest.mark.cpu

BF16 = ml_dtypes.bfloat16


class Tensor:
    """A tensor as torch has them: NumPy refuses its type, DLPack does not."""

    def __init__(self, array, device=1):
        self.array, self.device = array, device

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **options):
        return make_capsule(DeviceArray(self.array, "cpu:0"), **options)

    def __dlpack_device__(self):
        return self.device, 0


@pytest.fixture(scope="module")
def doubled():
    return aotc.load(aotc.compile(lambda x: x * 2, jnp.ones((2, 3), jnp.bfloat16)))


def test_bf16_tensors_are_arguments_and_results(doubled):
    x, out = np.arange(6).reshape(2, 3).astype(BF16), np.zeros((2, 3), BF16)
    for given in (Tensor(x), jnp.asarray(x), x):
        assert doubled(given).tolist() == (2 * x).tolist()
    target = Tensor(out)
    assert doubled.invoke("main", Tensor(x), out=[target])[0] is target
    assert out.tolist() == (2 * x).tolist()
    assert doubled.submit("main", Tensor(x), out=[target]).result()[0] is target
    assert doubled.put(Tensor(x)).numpy().tolist() == x.tolist()
    assert doubled.bind({"x": Tensor(x)})().tolist() == (2 * x).tolist()


def test_unusable_tensors_are_refused(doubled):
    x = np.zeros((2, 3), BF16)
    with pytest.raises(CallError, match=r"argument 0 \(x\) cannot be read as an array: Got unsupported"):
        doubled(Tensor(x, device=7))
    with pytest.raises(CallError, match="wrong shape"):
        doubled(Tensor(np.zeros((3, 3), BF16)))
    fixed = np.zeros((2, 3), BF16)
    fixed.flags.writeable = False
    with pytest.raises(CallError, match=r"out\[0\] cannot be written to: it is read-only"):
        doubled.invoke("main", x, out=[Tensor(fixed)])
    with pytest.raises(CallError, match="not a writable array"):
        doubled.invoke("main", x, out=[3])


def test_torch_tensors_are_arguments_and_outputs(doubled):
    torch = pytest.importorskip("torch")
    x, out = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), torch.zeros((2, 3), dtype=torch.bfloat16)
    assert doubled.invoke("main", x, out=[out])[0] is out
    assert out.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert doubled(x.T.contiguous().T).tolist() == [[0, 2, 4], [6, 8, 10]]  # not in row-major order


def test_i64_values_that_fit_i32_are_accepted():
    module = aotc.load(aotc.compile(lambda n, k: n + k.sum(), np.int32(0), np.zeros(3, np.int32)))
    assert module(np.int64(7), np.array([1, 2, 3])) == 13
    assert module(np.array(-7), np.arange(3)) == -4
    assert module(np.uint64(2**31 - 1), np.zeros(3, np.uint64)) == 2**31 - 1
    value = r"argument 0 \(n\) has a value that i32 cannot hold\n    found:    2147483648\n"
    with pytest.raises(CallError, match=value):
        module(np.int64(2**31), np.arange(3))
    with pytest.raises(CallError, match=r"argument 1 \(k\) has a value (.|\n)*found:    -3000000000 at \[2\]"):
        module(1, np.array([1, 2, -3_000_000_000]))
    for wrong in (np.float64(1), np.int16(1)):
        with pytest.raises(CallError, match="wrong dtype"):
            module(wrong, np.arange(3))


def in_another_process(module, x):
    return module(x), module.stats()["threads"], module.weights


def test_modules_are_pickled_by_their_path(tmp_path):
    x = np.ones(3, np.float32)
    data = aotc.compile(lambda w, x: x * w, x, x, bind=["w"], weights=str(tmp_path / "w.safetensors"))
    with pytest.raises(TypeError, match="loaded from bytes cannot be pickled"):
        pickle.dumps(aotc.load(aotc.compile(jnp.sin, x)))
    path = tmp_path / "m.vmfb"
    path.write_bytes(data)
    module = aotc.load(path, threads=1, max_in_flight=2)
    copy = pickle.loads(pickle.dumps(module))
    assert copy(2 * x).tolist() == [2, 2, 2]
    with get_context("spawn").Pool(1) as pool:
        found = pool.apply(in_another_process, (module, 3 * x))
    assert (found[0].tolist(), *found[1:]) == ([3, 3, 3], 1, {"w": "f32[3]"})


def test_functions_are_pickled_with_their_module(tmp_path):
    x = np.ones(3, np.float32)
    path = tmp_path / "m.vmfb"
    path.write_bytes(aotc.compile({"double": lambda x: x * 2, "sine": jnp.sin}, args={"double": (x,), "sine": (x,)}))
    double = aotc.load(path, threads=1).double
    with get_context("spawn").Pool(1) as pool:
        assert pool.map(double, [x, 2 * x])[1].tolist() == [4, 4, 4]
        for wrong, kind in ((np.ones(4, np.float32), aotc.CallError), ("no.vmfb", aotc.BundleError)):
            call = double if kind is aotc.CallError else aotc.load
            with pytest.raises(kind) as found:  # a pool whose errors cannot be read waits for ever
                pool.apply_async(call, (wrong,)).get(60)
            with pytest.raises(kind) as here:
                call(wrong)
            assert (type(found.value), str(found.value)) == (type(here.value), str(here.value))
    bound = aotc.load(path).bind({"x": x}, "double")
    with pytest.raises(TypeError, match="a function with bound arguments cannot be pickled"):
        pickle.dumps(bound)
    with pytest.raises(TypeError, match="loaded from bytes cannot be pickled"):
        pickle.dumps(aotc.load(path.read_bytes()).double)


def test_pickled_errors_preserve_their_text():
    late = aotc.DeadlineExceeded("main", "too late", 3, 2, "wait")
    late.add_note("more")
    copy = pickle.loads(pickle.dumps(late))
    assert (type(copy), str(copy), copy.__notes__) == (aotc.DeadlineExceeded, str(late), ["more"])
    internal = aotc.InternalError("broken", "folder", "aotc compile")
    assert str(pickle.loads(pickle.dumps(internal))) == str(internal)
    with pytest.raises(aotc.CompileError) as refused:
        aotc.compile("no.mlir")
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_dir_of_a_module_lists_its_functions():
    module = aotc.load(aotc.compile(jnp.sin, np.ones(3, np.float32)))
    assert {"main", "invoke", "submit"} <= set(dir(module))


def test_values_of_wrong_kinds_are_refused_immediately():
    module = aotc.load(aotc.compile(lambda x: (x, x + 1), np.ones(3, np.float32)))
    for x in (None, object(), "text", np.array(["a"])):
        with pytest.raises(CallError, match="the value for cpu:0 is not an array of numbers"):
            module.put(x)
    for results, found in (([], "0"), ([1, 2, 3], "3"), (iter([1, 2]), "list_iterator")):
        with pytest.raises(CallError, match=f"wrong number of results\n    found:    {found}\n    expected: 2"):
            module.main.rebuild(results)
    with pytest.raises(CallError, match="a callback of a fence is not a function"):
        aotc.Fence().add_done_callback(3)
    with pytest.raises(TypeError, match="the name of a custom call is a int"):
        aotc.register_custom_call(3, print)


def test_python_m_aotc_prints_the_version():
    done = subprocess.run([sys.executable, "-m", "aotc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"aotc {aotc.__version__}"


def test_the_package_is_marked_as_typed():
    assert resources.files("aotc").joinpath("py.typed").is_file()
