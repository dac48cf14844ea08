"""Memory in which every byte that a kernel must not use is NaN, in each float dtype that templates take."""

import numpy as np

MARGIN = 8192  # bytes on each side of an array: more than a template reads past one in a step
NAN_BYTE = 0xFF
ALIGNMENT = 256  # bytes: of arrays in GPU memory


def between_nans(array):
    """Return a copy of ``array`` with margins of NaN on both sides."""
    whole = np.full(array.nbytes + 2 * MARGIN + ALIGNMENT, NAN_BYTE, np.uint8)
    start = MARGIN + -(whole.ctypes.data + MARGIN) % ALIGNMENT
    made = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def check_margins(array):
    """Assert that no byte beside an array of :func:`between_nans` was written."""
    whole = array
    while whole.base is not None:
        whole = whole.base
    start = array.ctypes.data - whole.ctypes.data
    assert (whole[:start] == NAN_BYTE).all()
    assert (whole[start + array.nbytes :] == NAN_BYTE).all()


def poison(array, keep):
    """Fill the elements of ``array`` where ``keep`` is false with the bytes of NaN."""
    array.view(np.uint8).reshape(*array.shape, array.itemsize)[~keep] = NAN_BYTE
