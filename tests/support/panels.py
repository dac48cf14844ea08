"""Packing of a constant right operand into the panels that tiles read."""

from __future__ import annotations

import numpy as np

from aotc.ir.loop.forms.tile_forms import FORMS


def pack_panels(b: np.ndarray, panel_cols: int, form: str) -> np.ndarray:
    """Return ``b`` as panels of columns, each contiguous in order of k.

    Parameters
    ----------
    b : ndarray, (K, N)
        Right operand, of the dtype that ``form`` reads (f32, f64, bf16, i8).
    panel_cols : int
        Columns of a panel.
    form : str
        A key of ``aotc.ir.loop.forms.tile_forms.FORMS``; its ``group`` consecutive k of one column are neighbours.

    Returns
    -------
    ndarray, (ceil(N / panel_cols), ceil(K / group), panel_cols * group)
        Zero where K or N is padded; C-contiguous, dtype of ``b``.
    """
    group = FORMS[form].group
    k, n = b.shape
    panels, steps = -(-n // panel_cols), -(-k // group)
    padded = np.zeros((steps * group, panels * panel_cols), b.dtype)
    padded[:k, :n] = b
    cut = padded.reshape(steps, group, panels, panel_cols).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(cut).reshape(panels, steps, panel_cols * group)
