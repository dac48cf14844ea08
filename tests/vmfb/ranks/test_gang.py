"""A gang: ranks as child processes, whole arrays in and out, as on one device."""

import os
import pickle
import socket
import threading

import jax
import numpy as np
import pytest
from support import small_sharded
from support.small_sharded import arguments, assert_close, bundle, expected

import aotc
from aotc.vmfb.errors import ArgumentError, ArgumentValueError
from aotc.vmfb.gang import gang as gang_module
from aotc.vmfb.gang.shared_arrays import SharedFunction, mapped_memory, memory_file
from aotc.vmfb.ranks.layout import Mesh

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def pair():
    with aotc.gang(bundle(2)) as module:
        yield module


def test_results_and_their_structure_are_those_of_one_device(pair):
    for seed in range(3):
        assert_close(pair(*arguments(seed)), expected(*arguments(seed)))
    weights, x, scale = arguments(7)
    assert_close(pair(weights, x=x, scale=0.25), expected(weights, x, scale))
    assert_close(pair.main(weights, jax.numpy.asarray(x), scale), expected(weights, x, scale))


def test_four_ranks_of_a_file_with_two_axes(tmp_path):
    bundle(4).save(tmp_path / "model.vmfb")
    with aotc.gang(tmp_path / "model.vmfb", ranks=4, threads=1, verify=True) as module:
        assert_close(module(*arguments()), expected(*arguments()))
        assert len(set(module.processes)) == 4
        assert os.getpid() not in module.processes
        assert len(module.rank_seconds) == 4
        x = np.arange(32, dtype="f4").reshape(8, 4)
        np.testing.assert_allclose(module["spin"](x, 3), jax.jit(small_sharded.spin)(x, 3), 1e-5)


def test_results_stay_when_the_next_call_runs(pair):
    first = pair(*arguments(1))
    pair(*arguments(2))
    assert_close(first, expected(*arguments(1)))


def test_functions_and_signatures_show_whole_arrays(pair):
    assert list(pair.functions) == ["main", "spin"]
    assert str(pair.inputs[0]) == "params['w1']: f32[16, 32]"
    assert "spin(x: f32[8, 4], count: i32[]) -> (result: f32[8, 4])" in repr(pair)
    assert pair.signature is pair.main.signature
    assert "on 2 ranks (model=2)" in repr(pair)
    with pytest.raises(AttributeError, match="no function 'mian'"):
        pair.mian()
    with pytest.raises(ArgumentValueError, match="no function 'x'"):
        pair.invoke("x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, x: (w, x[:4]), r"argument 2 \(x\) has the wrong shape\n.*f32\[4, 16\]\n.*f32\[8, 16\]"),
        (lambda w, x: ({**w, "w1": w["w1"][:, :16]}, x), "is one rank's part(.|\n)*the gang cuts it by -, model"),
        (lambda w, x: (w, x.astype("i4")), "the wrong dtype"),
        (lambda w, x: ({"w1": w["w1"]}, x), "w2"),
    ],
)
def test_wrong_arguments_are_refused_and_the_gang_stays(pair, change, message):
    weights, x, scale = arguments()
    with pytest.raises(aotc.CallError, match=message):
        pair(*change(weights, x), scale)
    with pytest.raises(ArgumentError, match="wrong number of arguments"):
        pair.invoke("main", x)
    assert_close(pair(weights, x, scale), expected(weights, x, scale))


def test_calls_of_threads_run_one_after_another(pair):
    wrong = []

    def work(seed):
        try:
            for _ in range(5):
                assert_close(pair(*arguments(seed)), expected(*arguments(seed)))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_gangs_at_a_time(pair):
    with aotc.gang(bundle(2), threads=1) as other:
        assert_close(other(*arguments(1)), expected(*arguments(1)))
        assert_close(pair(*arguments(2)), expected(*arguments(2)))
        assert_close(other(*arguments(3)), expected(*arguments(3)))


def test_calls_of_a_gang_are_not_submitted_and_it_is_not_pickled(pair):
    with pytest.raises(aotc.CallError, match="calls of a gang are not submitted"):
        pair.main.submit(*arguments())
    for value in (pair, pair.main):
        with pytest.raises(TypeError, match="a gang cannot be pickled"):
            pickle.dumps(value)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"ranks": 3}, aotc.BundleError, r"for 2 ranks \(model=2\), and there are 3"),
        ({"ranks": 0}, ArgumentValueError, "ranks must be a positive integer"),
        ({"ranks": True}, ArgumentValueError, "ranks must be a positive integer"),
        ({"timeout": 0}, ArgumentValueError, "timeout must be positive"),
        ({"timeout": float("nan")}, ArgumentValueError, "timeout must be positive"),
        ({"weights": {"w": np.zeros(3)}}, ArgumentError, "weights= of a gang is a file"),
        ({"thread": 1}, ArgumentError, "gang has no keyword 'thread'(.|\n)*threads="),
    ],
)
def test_wrong_keywords_start_nothing(monkeypatch, keywords, error, message):
    monkeypatch.setattr(gang_module, "RankProcesses", None)
    with pytest.raises(error, match=message):
        aotc.gang(bundle(2), **keywords)


def test_a_bundle_of_one_device_takes_no_gang():
    data = aotc.compile(lambda x: x + 1, np.zeros(3, "f4"))
    with pytest.raises(aotc.BundleError, match="is not sharded: it has no ranks"):
        aotc.gang(data)
    with pytest.raises(aotc.BundleNotFoundError):
        aotc.gang("/nowhere/model.vmfb")


def test_parts_in_shared_memory_are_stored_once():
    """The sizes are those of whole arrays, if no part is there twice; results have no place of arguments."""
    row = {"name": "w", "dtype": "bf16", "dims": [4, 8], "layout": [["a"], []], "whole": [8, 8]}
    signature = aotc.vmfb.arguments.Signature(
        "f", {"arguments": [row, {"name": "n", "dtype": "i4", "dims": []}], "results": [row]}
    )
    shared = SharedFunction(Mesh((("a", 2), ("b", 3)), (5, 4, 3, 2, 1, 0)), signature)
    assert shared.size == 2 * 64 + 64 + 2 * 64
    file = memory_file(shared.size)
    memory = mapped_memory(file)
    os.close(file)
    whole = np.arange(64).reshape(8, 8).astype("bfloat16")
    shared.write(memory, [whole, np.ones((), "int4")])
    for rank in range(6):
        part, number = shared.rank_arguments(memory, rank)
        np.testing.assert_array_equal(part, whole[4:] if rank < 3 else whole[:4])
        assert number == 1
        assert not part.flags.writeable
        (out,) = shared.rank_results(memory, rank)
        assert (out is not None) == (rank in (0, 3))
        if out is not None:
            out[...] = part
    np.testing.assert_array_equal(shared.read(memory)[0], whole)


def test_the_port_of_a_gang_belongs_to_it():
    with gang_module._free_address() as address, socket.socket() as rank:
        port = int(address.rpartition(":")[2])
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("127.0.0.1", port))
        rank.listen()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
