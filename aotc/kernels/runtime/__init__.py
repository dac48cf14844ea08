"""Functions that printed kernels import: casts, number formats, scalar functions, memory, register tiles; for Numba.

A printed kernel (``aotc dump --kernels -o kernels.py``) imports its functions from here. The names of dtypes are casts
and element types: ``f32(x)``, ``private((4,), f32)``. :mod:`aotc.kernels.numba_front.source` prints kernels.
"""

from aotc.kernels.runtime import complexes, formats, integers, memory, reals, rounding, tiles

for _module in (formats, integers, rounding, reals, complexes, memory, tiles):
    globals().update({name: value for name, value in vars(_module).items() if not name.startswith("_")})
globals().update(formats.small_float_functions())
