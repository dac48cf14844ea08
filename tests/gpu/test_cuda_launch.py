"""How kernels are launched whose entries say so: blocks in three directions, shared memory, clusters, tensor maps."""

import ctypes

import pytest

from aotc.vmfb.abi import MAP_BYTES
from aotc.vmfb.devices.cuda import tensor_map
from aotc.vmfb.devices.cuda.commands import LaunchCommand
from aotc.vmfb.devices.cuda.launch import (
    MAX_BLOCKS_ACROSS,
    MAX_CLUSTER,
    MAX_SHARED,
    LaunchShape,
    fits_gpu_limits,
    launch_of,
)
from aotc.vmfb.devices.cuda.libcuda import library as driver_library
from aotc.vmfb.errors import CallError
from aotc.vmfb.verify.kernel_interface import MAP_ELEMENT_BYTES, Interface, Invalid

pytestmark = pytest.mark.ir

MAP = {"buffer": 0, "type": "bf16", "sizes": [512, [1]], "strides": [["*", 2, 512]], "box": [64, 128], "swizzle": 128}
TILES = ["//", ["+", [0], 127], 128]
LAUNCH = {"blocks": [4, TILES, [1]], "resident": 0, "cluster": [2, 1, 1], "shared": 200 << 10, "maps": [MAP]}


def kernel(**changed):
    return {"name": "k", "threads": 256, "items": 1, "extents": [8, 8], "launch": {**LAUNCH, **changed}}


def test_blocks_follow_the_dims():
    assert launch_of("m", kernel(), (300, 7), 0, 9) == LaunchShape((4, 3, 7), 256, 200 << 10, (2, 1, 1))
    assert launch_of("m", kernel(), (0, 7), 0, 9).is_empty
    assert launch_of("m", {"name": "k", "threads": 64, "items": 64}, (), 130, 9) == LaunchShape((3, 1, 1), 64)


def test_resident_blocks_limit_the_grid():
    assert launch_of("m", kernel(resident=2), (300, 7), 0, 1).blocks == (2, 3, 7)
    assert launch_of("m", kernel(resident=2), (300, 7), 0, 132).blocks == (4, 3, 7)


def test_too_many_blocks():
    assert launch_of("m", kernel(), (1, MAX_BLOCKS_ACROSS), 0, 9).blocks[2] == MAX_BLOCKS_ACROSS
    with pytest.raises(CallError, match="'k' has too large a grid"):
        launch_of("m", kernel(), (1, MAX_BLOCKS_ACROSS + 1), 0, 9)


WRONG = {
    "two directions": {"blocks": [1, 1]},
    "a cluster of none": {"cluster": [1, 0, 1]},
    "too large a cluster": {"cluster": [MAX_CLUSTER, 2, 1]},
    "a flat cluster": {"cluster": [2]},
    "too much memory": {"shared": MAX_SHARED + 1},
    "less than none": {"shared": -1},
    "blocks that do not stay": {"resident": -1},
}


@pytest.mark.parametrize("name", WRONG)
def test_launches_beyond_gpu_limits_are_refused(name):
    assert fits_gpu_limits(kernel())
    assert not fits_gpu_limits(kernel(**WRONG[name]))


@pytest.mark.parametrize(
    "wrong",
    [{"buffer": 2}, {"type": "c64"}, {"swizzle": 16}, {"strides": []}, {"box": [1]}, {"sizes": [1] * 6}, {"sizes": []}],
)
def test_invalid_tensor_maps_are_refused(wrong):
    assert tensor_map.is_valid_tensor_map(MAP, 2)
    assert not tensor_map.is_valid_tensor_map({**MAP, **wrong}, 2)


def touched(*maps, extents=(512 * 7 * 2, 8), dims=2):
    """Return what the loader knows of a kernel with tensor maps."""
    row = {"name": "k", "inputs": 1, "dims": dims, "grid": 1, "extents": list(extents), "aliases": []}
    return Interface({**row, "launch": {"maps": list(maps)}})


ROWS = {**MAP, "strides": [1024]}


def test_a_map_ends_within_its_array():
    touched(ROWS).evaluate_sizes((0, 7))
    touched({**ROWS, "offset": 1024}).evaluate_sizes((0, 6))
    with pytest.raises(Invalid, match=r"kernel 'k' describes bytes 0 to 8192 of its array 0, which has 7168"):
        touched(ROWS).evaluate_sizes((0, 8))
    with pytest.raises(Invalid, match="bytes 2 to 7170 of its array 0"):
        touched({**ROWS, "offset": 2}).evaluate_sizes((0, 7))


@pytest.mark.parametrize("wrong", [{"sizes": [512, 8]}, {"strides": [1026]}, {"offset": -16}, {"strides": [-1024]}])
def test_a_map_of_known_sizes_is_checked_once(wrong):
    known = {**ROWS, "sizes": [512, 7]}
    assert touched(known).static
    with pytest.raises(Invalid, match="describes bytes"):
        touched({**known, **wrong})


def test_nothing_is_read_of_an_empty_array():
    """Its map has sizes of 1, for none may be 0; nor of a slice of no rows at the end of an array."""
    empty = {**ROWS, "offset": 7 * 1024, "sizes": [512, ["max", 1, [1]]]}
    touched(empty).evaluate_sizes((0, 0))
    touched({**ROWS, "sizes": [512, 1]}, extents=(0, 8)).evaluate_sizes((0, 0))
    with pytest.raises(Invalid):
        touched(empty).evaluate_sizes((0, 1))


def test_dtypes_of_tensor_maps_have_element_sizes():
    assert tensor_map._TYPES.keys() == MAP_ELEMENT_BYTES.keys()


class Recorder:
    """The driver's functions, with their arguments; ``status`` is what all return."""

    def __init__(self, status=0):
        self.calls, self.status = [], status

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append((name, arguments))
            return self.status if name != "cuGetErrorName" else 1

        return function


def test_arguments_of_encode_tiled(monkeypatch):
    library = Recorder()
    monkeypatch.setattr(driver_library.DRIVER, "library", library)
    made = tensor_map.encode_tensor_map("m", MAP, 0x1000, (300, 7))
    assert ctypes.addressof(made) % 64 == 0
    assert ctypes.sizeof(made) == MAP_BYTES
    ((name, (_, kind, rank, address, sizes, strides, box, steps, interleave, swizzle, _, fill)),) = library.calls
    assert (name, kind, rank, address, interleave, swizzle, fill) == ("cuTensorMapEncodeTiled", 9, 2, 0x1000, 0, 3, 0)
    assert (list(sizes), list(strides)[:1], list(box), list(steps)) == ([512, 7], [1024], [64, 128], [1, 1])


def test_an_array_that_cannot_be_copied_in_tiles(monkeypatch):
    monkeypatch.setattr(driver_library.DRIVER, "library", Recorder(status=1))
    with pytest.raises(CallError, match=r"cannot be copied in tiles.*\n.*\[512, 7\] of bf16 at 0x1008"):
        tensor_map.encode_tensor_map("m", MAP, 0x1008, (300, 7))


def test_a_tensor_map_is_retargeted_to_another_address(monkeypatch):
    library = Recorder()
    monkeypatch.setattr(driver_library.DRIVER, "library", library)
    row = {**MAP, "offset": ["*", [0], 16]}
    made = tensor_map.encode_tensor_map("m", row, 0x1000, (300, 7))
    tensor_map.retarget_tensor_map("m", row, made, (300, 7), 0x8000)
    assert library.calls[1:] == [("cuTensorMapReplaceAddress", (made, 0x8000 + 300 * 16))]
    library.status = 1
    with pytest.raises(CallError, match=r"cannot be copied in tiles.*\n.*\[512, 7\] of bf16 at 0x8008"):
        tensor_map.retarget_tensor_map("m", MAP, made, (300, 7), 0x8008)


class Part:
    """What a launch asks of a variant on a GPU, which notes what happens in which order."""

    where, functions = "m", {3: "function"}

    def __init__(self):
        self.gpu, self.kernels, self.log = self, {3: kernel(maps=[{**MAP, "buffer": 1}])}, []

    def kernel_setter(self, recording, node, function, shape, table):
        def change():
            values = [ctypes.c_int64.from_address(place).value for place in table[1:]]
            self.log.append((recording, node, function, shape, values))
            return 0

        return change


def test_tensor_maps_are_retargeted_before_their_graph_node(monkeypatch):
    part = Part()
    monkeypatch.setattr(tensor_map, "encode_tensor_map", lambda *_: ctypes.create_string_buffer(MAP_BYTES))
    monkeypatch.setattr(
        tensor_map, "retarget_tensor_map", lambda where, row, made, dims, address: part.log.append(address)
    )
    command = LaunchCommand(part, 3, [0x1000, 0x2000], LaunchShape((1, 1, 1), 32), [300, 7, 9])
    command.set_graph_node("graph", 5)
    values, number = command.cells[1]
    values[number] = 0x3000
    assert command.node_setter()() == command.change() == 0
    launch = "graph", 5, "function", LaunchShape((1, 1, 1), 32), [0x1000, 0x3000, 300, 7, 9]
    assert part.log == [0x3000, launch] * 2


def test_fields_of_the_launch_configuration():
    config = LaunchShape((4, 3, 2), 256, 1024, (2, 1, 1)).config(ctypes.c_void_p(77))
    assert (list(config.blocks), list(config.threads), config.shared) == ([4, 3, 2], [256, 1, 1], 1024)
    assert (config.stream, config.count) == (77, 1)
    attribute = config.attributes[0]
    assert (attribute.id, list(attribute.value)[:3]) == (4, [2, 1, 1])
    assert ctypes.sizeof(config) == 56
    assert LaunchShape((1, 1, 1), 32).config(ctypes.c_void_p(77)).count == 0
