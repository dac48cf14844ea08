"""Calls of public functions that take shapes, axes, sizes or functions: ``name: (argument kinds, call)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.optimize
import jax.scipy.spatial.transform
from jax import lax

Call = Callable[..., Any]

LAX: dict[str, tuple[str, Call]] = {
    "jax.lax.approx_max_k": ("f", lambda x: lax.approx_max_k(x, 3)),
    "jax.lax.approx_min_k": ("f", lambda x: lax.approx_min_k(x, 3)),
    "jax.lax.argmax": ("f", lambda x: lax.argmax(x, 1, jnp.int32)),
    "jax.lax.argmin": ("f", lambda x: lax.argmin(x, 0, jnp.int32)),
    "jax.lax.associative_scan": ("f", lambda x: lax.associative_scan(jnp.add, x, axis=1)),
    "jax.lax.associative_scan(matrices)": ("3", lambda x: lax.associative_scan(jnp.maximum, x, reverse=True)),
    "jax.lax.bitcast_convert_type": ("f", lambda x: lax.bitcast_convert_type(x, jnp.uint32)),
    "jax.lax.bitcast_convert_type(bytes)": ("f", lambda x: lax.bitcast_convert_type(x, jnp.uint8)),
    "jax.lax.broadcast": ("f", lambda x: lax.broadcast(x, (2, 4))),
    "jax.lax.broadcast_in_dim": ("v", lambda x: lax.broadcast_in_dim(x, (2, 7, 3), (1,))),
    "jax.lax.broadcasted_iota": ("", lambda: lax.broadcasted_iota(jnp.int32, (3, 5), 1)),
    "jax.lax.collapse": ("3", lambda x: lax.collapse(x, 0, 2)),
    "jax.lax.concatenate": ("ff", lambda x, y: lax.concatenate([x, y], 1)),
    "jax.lax.cond": ("f", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)),
    "jax.lax.conv": ("", lambda: lax.conv(_image(), _kernel("OIHW"), (1, 1), "SAME")),
    "jax.lax.conv_general_dilated_local": ("", lambda: _local_convolution()),
    "jax.lax.conv_general_dilated_patches": (
        "",
        lambda: lax.conv_general_dilated_patches(_image(), (2, 2), (1, 1), "SAME"),
    ),
    "jax.lax.conv_transpose": ("", lambda: lax.conv_transpose(_image("NHWC"), _kernel(), (2, 2), "SAME")),
    "jax.lax.conv_with_general_padding": (
        "",
        lambda: lax.conv_with_general_padding(_image(), _kernel("OIHW"), (1, 2), ((1, 0), (0, 2)), (2, 1), (1, 2)),
    ),
    "jax.lax.convert_element_type": ("f", lambda x: lax.convert_element_type(x, jnp.int8)),
    "jax.lax.cumlogsumexp": ("f", lambda x: lax.cumlogsumexp(x, 1)),
    "jax.lax.cummax": ("f", lambda x: lax.cummax(x, 1, reverse=True)),
    "jax.lax.cummin": ("f", lambda x: lax.cummin(x, 0)),
    "jax.lax.cumprod": ("f", lambda x: lax.cumprod(x, 1)),
    "jax.lax.cumsum": ("f", lambda x: lax.cumsum(x, 1, reverse=True)),
    "jax.lax.custom_linear_solve": (
        "lv",
        lambda a, v: lax.custom_linear_solve(lambda x: a @ x, v[:4], lambda _, b: jnp.linalg.solve(a, b)),
    ),
    "jax.lax.custom_root": (
        "p",
        lambda x: lax.custom_root(
            lambda y: y * y - x,
            x,
            lambda f, y: lax.fori_loop(0, 30, lambda _, y: 0.5 * (y + x / y), y),
            lambda g, y: y / g(jnp.ones_like(y)),
        ),
    ),
    "jax.lax.dot_general": ("33", lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,))))),
    "jax.lax.dynamic_index_in_dim": ("fn", lambda x, n: lax.dynamic_index_in_dim(x, n[0], 1)),
    "jax.lax.dynamic_slice": ("fn", lambda x, n: lax.dynamic_slice(x, (n[0], n[1]), (2, 2))),
    "jax.lax.dynamic_slice_in_dim": ("fn", lambda x, n: lax.dynamic_slice_in_dim(x, n[2], 2, 1)),
    "jax.lax.dynamic_update_slice": ("ffn", lambda x, y, n: lax.dynamic_update_slice(x, y[:2, :2], (n[0], n[1]))),
    "jax.lax.dynamic_update_index_in_dim": ("ffn", lambda x, y, n: lax.dynamic_update_index_in_dim(x, y[0], n[0], 0)),
    "jax.lax.dynamic_update_slice_in_dim": ("ffn", lambda x, y, n: lax.dynamic_update_slice_in_dim(x, y[:1], n[0], 0)),
    "jax.lax.expand_dims": ("f", lambda x: lax.expand_dims(x, (0, 2))),
    "jax.lax.fft": ("z", lambda x: lax.fft(x, lax.FftType.FFT, (5,))),
    "jax.lax.fori_loop": ("f", lambda x: lax.fori_loop(0, 5, lambda i, y: jnp.sin(y) + i, x)),
    "jax.lax.full_like": ("f", lambda x: lax.full_like(x, 2.5)),
    "jax.lax.gather": ("fn", lambda x, n: x.at[n % 3, n % 5].get(mode="fill")),
    "jax.lax.index_in_dim": ("f", lambda x: lax.index_in_dim(x, 2, 1)),
    "jax.lax.index_take": ("fn", lambda x, n: lax.index_take(x, (n % 3, n % 5), (0, 1))),
    "jax.lax.integer_pow": ("f", lambda x: lax.integer_pow(x, -3)),
    "jax.lax.iota": ("", lambda: lax.iota(jnp.float32, 9)),
    "jax.lax.map": ("f", lambda x: lax.map(jnp.cumsum, x)),
    "jax.lax.optimization_barrier": ("ff", lambda x, y: lax.optimization_barrier((x, y))),
    "jax.lax.pad": ("f", lambda x: lax.pad(x, 1.5, ((1, -1, 2), (0, 3, 1)))),
    "jax.lax.polygamma": ("p", lambda x: lax.polygamma(jnp.ones_like(x), x)),
    "jax.lax.ragged_dot": (
        "fn",
        lambda x, n: lax.ragged_dot(x, jnp.ones((2, 5, 4)) * x[0, 0], jnp.array([1, 2], jnp.int32)),
    ),
    "jax.lax.reduce": ("f", lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1, (1,))),
    "jax.lax.reduce(pair)": (
        "fi",
        lambda x, i: lax.reduce(
            (x, i), (-jnp.inf, 0), lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])), (1,)
        ),
    ),
    "jax.lax.reduce_precision": ("f", lambda x: lax.reduce_precision(x, 5, 4)),
    "jax.lax.reduce_window": ("f", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME")),
    "jax.lax.reduce_window(dilated)": (
        "f",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), ((1, 1), (0, 2)), (2, 1), (1, 2)),
    ),
    "jax.lax.reshape": ("f", lambda x: lax.reshape(x, (5, 3), (1, 0))),
    "jax.lax.rev": ("f", lambda x: lax.rev(x, (0, 1))),
    "jax.lax.rng_bit_generator": ("", lambda: lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), (5, 3))),
    "jax.lax.scan": ("f", lambda x: lax.scan(lambda c, y: (c + y.sum(), c * y), 0.0, x)),
    "jax.lax.scatter_apply": ("fn", lambda x, n: x.at[n % 3].apply(jnp.sin)),
    "jax.lax.scatter_sub": ("fn", lambda x, n: x.at[n % 3].subtract(1.0)),
    "jax.lax.select_n": ("iff", lambda i, x, y: lax.select_n(i > 0, x, y)),
    "jax.lax.slice": ("f", lambda x: lax.slice(x, (0, 1), (3, 5), (2, 2))),
    "jax.lax.sort": ("f", lambda x: lax.sort(x, 0)),
    "jax.lax.sort_key_val": ("fi", lambda x, i: lax.sort_key_val(x, i)),
    "jax.lax.split": ("f", lambda x: lax.split(x, (2, 3), 1)),
    "jax.lax.switch": ("fn", lambda x, n: lax.switch(n[0], [jnp.sin, jnp.cos, jnp.tanh], x)),
    "jax.lax.top_k": ("f", lambda x: lax.top_k(x, 2)),
    "jax.lax.while_loop": ("f", lambda x: lax.while_loop(lambda y: (y < 9).all(), lambda y: y * y + 1, x)),
    "jax.lax.linalg.cholesky_update": ("sv", lambda s, v: lax.linalg.cholesky_update(jnp.linalg.cholesky(s).T, v[:4])),
    "jax.lax.linalg.householder_product": ("f", lambda x: lax.linalg.householder_product(x.T, x[0, :3] * 0.1)),
    "jax.lax.linalg.lu": ("l", lax.linalg.lu),
    "jax.lax.linalg.qr": ("f", lambda x: lax.linalg.qr(x, full_matrices=False)),
    "jax.lax.linalg.qr(pivoting)": ("f", lambda x: lax.linalg.qr(x, pivoting=True)),
    "jax.lax.linalg.qdwh": ("l", lambda a: lax.linalg.qdwh(a)[:2]),
    "jax.lax.linalg.lu_pivots_to_permutation": (
        "",
        lambda: lax.linalg.lu_pivots_to_permutation(jnp.array([2, 2, 3, 3]), 4),
    ),
    "jax.lax.linalg.triangular_solve": (
        "lm",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
    ),
    "jax.lax.linalg.tridiagonal": ("s", lambda a: lax.linalg.tridiagonal(a)[1:3]),
    "jax.lax.linalg.tridiagonal_solve": (
        "vp",
        lambda v, p: lax.linalg.tridiagonal_solve(v.at[0].set(0), v + 9, v.at[-1].set(0), v[:, None]),
    ),
}

NUMPY: dict[str, tuple[str, Call]] = {
    "jax.numpy.apply_along_axis": ("f", lambda x: jnp.apply_along_axis(jnp.cumsum, 1, x)),
    "jax.numpy.arange": ("", lambda: jnp.arange(2, 17, 3)),
    "jax.numpy.argpartition": ("f", lambda x: jnp.argpartition(x, 2)[:, 2]),
    "jax.numpy.argwhere": ("i", lambda x: jnp.argwhere(x > 0, size=6)),
    "jax.numpy.array_split": ("v", lambda x: jnp.array_split(x, 3)),
    "jax.numpy.average": ("fp", lambda x, w: jnp.average(x, 1, w)),
    "jax.numpy.bincount": ("n", lambda x: jnp.bincount(x, length=6)),
    "jax.numpy.block": ("mm", lambda a, b: jnp.block([[a, b], [b, a]])),
    "jax.numpy.bartlett": ("", lambda: jnp.bartlett(9)),
    "jax.numpy.blackman": ("", lambda: jnp.blackman(9)),
    "jax.numpy.hanning": ("", lambda: jnp.hanning(9)),
    "jax.numpy.hamming": ("", lambda: jnp.hamming(9)),
    "jax.numpy.kaiser": ("", lambda: jnp.kaiser(9, 3.0)),
    "jax.numpy.choose": ("n", lambda n: jnp.choose(n % 2, [n, -n])),
    "jax.numpy.clip": ("f", lambda x: jnp.clip(x, -0.5, 0.5)),
    "jax.numpy.compress": ("f", lambda x: jnp.compress(jnp.array([True, False, True]), x, 0, size=2)),
    "jax.numpy.cross": ("mm", lambda a, b: jnp.cross(a[:, :3], b[:, :3])),
    "jax.numpy.delete": ("v", lambda x: jnp.delete(x, 2)),
    "jax.numpy.digitize": ("fv", lambda x, v: jnp.digitize(x, jnp.sort(v))),
    "jax.numpy.einsum": ("33", lambda x, y: jnp.einsum("bij,bkj->bik", x, y)),
    "jax.numpy.eye": ("", lambda: jnp.eye(4, 5, 1)),
    "jax.numpy.extract": ("f", lambda x: jnp.extract(x > 0, x, size=5)),
    "jax.numpy.geomspace": ("", lambda: jnp.geomspace(1, 9, 7)),
    "jax.numpy.flatnonzero": ("i", lambda x: jnp.flatnonzero(x > 0, size=5)),
    "jax.numpy.histogram": ("f", lambda x: jnp.histogram(x, 5)),
    "jax.numpy.histogram2d": ("vw", lambda v, w: jnp.histogram2d(v, w, 3)),
    "jax.numpy.insert": ("v", lambda x: jnp.insert(x, 2, 9.0)),
    "jax.numpy.interp": ("fv", lambda x, v: jnp.interp(x, jnp.sort(v), v)),
    "jax.numpy.intersect1d": ("nn", lambda x, y: jnp.intersect1d(x, y, size=4)),
    "jax.numpy.ix_": ("n", lambda x: jnp.ix_(x, x)),
    "jax.numpy.lexsort": ("vw", lambda v, w: jnp.lexsort((v, w))),
    "jax.numpy.linspace": ("", lambda: jnp.linspace(0, 3, 11)),
    "jax.numpy.logspace": ("", lambda: jnp.logspace(0, 2, 7)),
    "jax.numpy.meshgrid": ("vw", lambda v, w: jnp.meshgrid(v, w)),
    "jax.numpy.matvec": ("mv", lambda m, v: jnp.matvec(m, v[:4])),
    "jax.numpy.vecmat": ("mv", lambda m, v: jnp.vecmat(v[:4], m)),
    "jax.numpy.moveaxis": ("3", lambda x: jnp.moveaxis(x, 0, 2)),
    "jax.numpy.nonzero": ("i", lambda x: jnp.nonzero(x, size=6)),
    "jax.numpy.nanpercentile": ("f", lambda x: jnp.nanpercentile(x, 30.0, 1)),
    "jax.numpy.nanquantile": ("f", lambda x: jnp.nanquantile(x, 0.3)),
    "jax.numpy.packbits": ("o", lambda x: jnp.packbits(x, axis=1)),
    "jax.numpy.pad(reflect)": ("f", lambda x: jnp.pad(x, ((1, 2), (0, 1)), "reflect")),
    "jax.numpy.pad(linear_ramp)": ("f", lambda x: jnp.pad(x, 2, "linear_ramp")),
    "jax.numpy.pad": ("f", lambda x: jnp.pad(x, 1)),
    "jax.numpy.partition": ("f", lambda x: jnp.partition(x, 2)[:, 2]),
    "jax.numpy.percentile": ("f", lambda x: jnp.percentile(x, jnp.array([10.0, 50.0]), 1)),
    "jax.numpy.piecewise": ("f", lambda x: jnp.piecewise(x, [x < 0, x >= 0], [jnp.sin, jnp.cos])),
    "jax.numpy.poly": ("v", jnp.poly),
    "jax.numpy.polyder": ("v", jnp.polyder),
    "jax.numpy.polyint": ("v", jnp.polyint),
    "jax.numpy.polyfit": ("vw", lambda v, w: jnp.polyfit(v, w, 2)),
    "jax.numpy.polyval": ("vw", jnp.polyval),
    "jax.numpy.put_along_axis": ("fn", lambda x, n: jnp.put_along_axis(x, n[:3, None] % 5, 9.0, 1, inplace=False)),
    "jax.numpy.quantile": ("f", lambda x: jnp.quantile(x, 0.25, 0)),
    "jax.numpy.ravel_multi_index": ("nn", lambda a, b: jnp.ravel_multi_index((a, b), (6, 6), mode="clip")),
    "jax.numpy.repeat": ("f", lambda x: jnp.repeat(x, 2, 1)),
    "jax.numpy.repeat(counts)": ("vn", lambda v, n: jnp.repeat(v, n, total_repeat_length=12)),
    "jax.numpy.roll": ("f", lambda x: jnp.roll(x, 2, 1)),
    "jax.numpy.roots": ("v", lambda v: jnp.roots(v, strip_zeros=False)),
    "jax.numpy.searchsorted": ("vf", lambda v, x: jnp.searchsorted(jnp.sort(v), x)),
    "jax.numpy.select": ("f", lambda x: jnp.select([x < 0, x < 1], [x, x * 2], 7.0)),
    "jax.numpy.setdiff1d": ("nn", lambda a, b: jnp.setdiff1d(a, b, size=4)),
    "jax.numpy.setxor1d": ("nn", lambda a, b: jnp.setxor1d(a, b + 1, size=5)),
    "jax.numpy.split": ("f", lambda x: jnp.split(x, 5, 1)),
    "jax.numpy.swapaxes": ("3", lambda x: jnp.swapaxes(x, 0, 2)),
    "jax.numpy.take": ("fn", lambda x, n: jnp.take(x, n, 1)),
    "jax.numpy.take_along_axis": ("fn", lambda x, n: jnp.take_along_axis(x, n[:3, None] % 5, 1)),
    "jax.numpy.tensordot": ("33", lambda x, y: jnp.tensordot(x, y, ((0, 2), (0, 2)))),
    "jax.numpy.tile": ("f", lambda x: jnp.tile(x, (2, 3))),
    "jax.numpy.tri": ("", lambda: jnp.tri(4, 5, 1)),
    "jax.numpy.triu_indices": ("", lambda: jnp.triu_indices(4)),
    "jax.numpy.union1d": ("nn", lambda a, b: jnp.union1d(a, b, size=8)),
    "jax.numpy.unique": ("n", lambda n: jnp.unique(n, return_inverse=True, return_counts=True, size=7)),
    "jax.numpy.unpackbits": ("i", lambda x: jnp.unpackbits(x.astype(jnp.uint8), axis=1)),
    "jax.numpy.unravel_index": ("n", lambda n: jnp.unravel_index(n, (2, 3))),
    "jax.numpy.stack": ("ff", lambda x, y: jnp.stack([x, y], 1)),
    "jax.numpy.where(size)": ("i", lambda x: jnp.where(x > 0, size=5)),
    "jax.numpy.correlate(full)": ("vw", lambda v, w: jnp.correlate(v, w, "full")),
    "jax.numpy.linalg.matrix_power": ("m", lambda a: jnp.linalg.matrix_power(a, 5)),
    "jax.numpy.linalg.solve": ("lv", lambda a, v: jnp.linalg.solve(a, v[:4])),
    "jax.numpy.linalg.svd": ("f", lambda x: jnp.linalg.svd(x, full_matrices=False)),
    "jax.numpy.linalg.eig": ("m", jnp.linalg.eig),
    "jax.numpy.linalg.eigvals": ("m", jnp.linalg.eigvals),
    "jax.numpy.linalg.lstsq": ("fv", lambda x, v: jnp.linalg.lstsq(x.T, v[:5])[0]),
    "jax.numpy.linalg.multi_dot": ("mlm", lambda a, b, c: jnp.linalg.multi_dot([a, b, c])),
    "jax.numpy.linalg.norm(nuc)": ("m", lambda a: jnp.linalg.norm(a, "nuc")),
    "jax.numpy.linalg.tensorinv": ("l", lambda a: jnp.linalg.tensorinv(a, 1)),
    "jax.numpy.linalg.tensorsolve": ("lv", lambda a, v: jnp.linalg.tensorsolve(a, v[:4])),
}

OTHERS: dict[str, tuple[str, Call]] = {
    "jax.nn.dot_product_attention": (
        "",
        lambda: jax.nn.dot_product_attention(*[_heads(n) for n in range(3)], is_causal=True),
    ),
    "jax.nn.glu": ("3", jax.nn.glu),
    "jax.nn.one_hot": ("n", lambda n: jax.nn.one_hot(n, 5)),
    "jax.nn.softmax(where)": ("fo", lambda x, o: jax.nn.softmax(x, 1, where=o)),
    "jax.random.ball": ("k", lambda k: jax.random.ball(k, 3)),
    "jax.random.beta": ("kp", lambda k, p: jax.random.beta(k, p, p)),
    "jax.random.bits": ("k", lambda k: jax.random.bits(k, (5,), "uint8")),
    "jax.random.bernoulli": ("ku", lambda k, u: jax.random.bernoulli(k, u)),
    "jax.random.binomial": ("kj", lambda k, j: jax.random.binomial(k, j, 0.4)),
    "jax.random.choice": ("kf", lambda k, x: jax.random.choice(k, x, (4,))),
    "jax.random.choice(replace=False)": ("kv", lambda k, v: jax.random.choice(k, v, (4,), replace=False)),
    "jax.random.dirichlet": ("kp", lambda k, p: jax.random.dirichlet(k, p)),
    "jax.random.f": ("kpp", lambda k, p, q: jax.random.f(k, p, q)),
    "jax.random.fold_in": ("k", lambda k: jax.random.fold_in(k, 5)),
    "jax.random.geometric": ("ku", lambda k, u: jax.random.geometric(k, u)),
    "jax.random.gumbel": ("k", lambda k: jax.random.gumbel(k, (9,))),
    "jax.random.key": ("", lambda: jax.random.key_data(jax.random.key(3))),
    "jax.random.multinomial": ("kp", lambda k, p: jax.random.multinomial(k, jnp.float32(9), p[0] / p[0].sum())),
    "jax.random.multivariate_normal": ("ks", lambda k, s: jax.random.multivariate_normal(k, s[0], s)),
    "jax.random.normal": ("k", lambda k: jax.random.normal(k, (7, 3))),
    "jax.random.orthogonal": ("k", lambda k: jax.random.orthogonal(k, 3)),
    "jax.random.randint": ("k", lambda k: jax.random.randint(k, (9,), -5, 70)),
    "jax.random.triangular": ("k", lambda k: jax.random.triangular(k, 0.0, 0.3, 1.0, (5,))),
    "jax.random.truncated_normal": ("k", lambda k: jax.random.truncated_normal(k, -1.0, 2.0, (9,))),
    "jax.random.uniform": ("k", lambda k: jax.random.uniform(k, (17,), "bfloat16")),
    "jax.random.weibull_min": ("k", lambda k: jax.random.weibull_min(k, 1.5, 2.0, (5,))),
    "jax.random.generalized_normal": ("k", lambda k: jax.random.generalized_normal(k, 1.5, (5,))),
    "jax.random.normal(rbg)": ("", lambda: jax.random.normal(jax.random.key(7, impl="rbg"), (6,))),
    "jax.image.resize(bilinear)": ("", lambda: jax.image.resize(_image("NHWC"), (2, 9, 11, 3), "bilinear")),
    "jax.image.resize(lanczos3)": ("", lambda: jax.image.resize(_image("NHWC"), (2, 4, 3, 3), "lanczos3")),
    "jax.image.resize(nearest)": ("", lambda: jax.image.resize(_image("NHWC"), (2, 9, 3, 3), "nearest")),
    "jax.image.scale_and_translate": (
        "",
        lambda: jax.image.scale_and_translate(
            _image("NHWC"), (2, 8, 8, 3), (1, 2), jnp.array([1.2, 0.7]), jnp.array([0.3, -1.0]), "cubic"
        ),
    ),
    "jax.ops.segment_max": ("vn", lambda v, n: jax.ops.segment_max(v, n, 6)),
    "jax.ops.segment_min": ("vn", lambda v, n: jax.ops.segment_min(v, n, 6)),
    "jax.ops.segment_prod": ("vn", lambda v, n: jax.ops.segment_prod(v, n, 6)),
    "jax.ops.segment_sum": ("vn", lambda v, n: jax.ops.segment_sum(v, n, 6)),
    "jax.scipy.special.bernoulli": ("", lambda: jsp.special.bernoulli(8)),
    "jax.scipy.special.bessel_jn": ("u", lambda u: jsp.special.bessel_jn(u, v=3)),
    "jax.scipy.special.expn": ("p", lambda p: jsp.special.expn(3, p)),
    "jax.scipy.special.multigammaln": ("p", lambda p: jsp.special.multigammaln(p + 2, 3)),
    "jax.scipy.special.polygamma": ("p", lambda p: jsp.special.polygamma(2, p)),
    "jax.scipy.special.spence": ("p", jsp.special.spence),
    "jax.scipy.special.sph_harm_y": (
        "",
        lambda: jsp.special.sph_harm_y(jnp.array([2]), jnp.array([1]), jnp.array([0.3]), jnp.array([0.8]), n_max=2),
    ),
    "jax.scipy.linalg.cho_solve": ("sv", lambda s, v: jsp.linalg.cho_solve(jsp.linalg.cho_factor(s), v[:4])),
    "jax.scipy.linalg.lu_solve": ("lv", lambda a, v: jsp.linalg.lu_solve(jsp.linalg.lu_factor(a), v[:4])),
    "jax.scipy.linalg.solve_triangular": ("lv", lambda a, v: jsp.linalg.solve_triangular(a, v[:4], lower=True)),
    "jax.scipy.linalg.eigh_tridiagonal": ("vw", lambda v, w: jsp.linalg.eigh_tridiagonal(v, w[:6], eigvals_only=True)),
    "jax.scipy.linalg.funm": ("l", lambda a: jsp.linalg.funm(a, jnp.exp)),
    "jax.scipy.linalg.rsf2csf": ("ml", lambda a, b: jsp.linalg.rsf2csf(a, b)),
    "jax.scipy.linalg.hilbert": ("", lambda: jsp.linalg.hilbert(4)),
    "jax.scipy.linalg.solve": ("sv", lambda s, v: jsp.linalg.solve(s, v[:4], assume_a="pos")),
    "jax.scipy.linalg.expm_frechet": ("lm", lambda a, b: jsp.linalg.expm_frechet(a * 0.1, b)),
    "jax.scipy.linalg.qr_multiply": ("lm", lambda a, b: jsp.linalg.qr_multiply(a, b)),
    "jax.scipy.linalg.pascal": ("", lambda: jsp.linalg.pascal(5)),
    "jax.scipy.linalg.solve_sylvester": ("lml", lambda a, b, c: jsp.linalg.solve_sylvester(a, b, c)),
    "jax.scipy.signal.stft": ("", lambda: jsp.signal.stft(jnp.sin(jnp.arange(64.0)), nperseg=16)),
    "jax.scipy.signal.istft": (
        "",
        lambda: jsp.signal.istft(jsp.signal.stft(jnp.sin(jnp.arange(64.0)), nperseg=16)[2], nperseg=16),
    ),
    "jax.scipy.signal.welch": ("", lambda: jsp.signal.welch(jnp.sin(jnp.arange(64.0)), nperseg=16)),
    "jax.scipy.stats.rankdata": ("n", jsp.stats.rankdata),
    "jax.scipy.stats.mode": ("n", jsp.stats.mode),
    "jax.scipy.stats.binom.logpmf": ("ju", lambda j, u: jsp.stats.binom.logpmf(j, 9, u)),
    "jax.scipy.stats.nbinom.logpmf": ("ju", lambda j, u: jsp.stats.nbinom.logpmf(j, 4, u)),
    "jax.scipy.stats.betabinom.logpmf": ("jpp", lambda j, a, b: jsp.stats.betabinom.logpmf(j, 9, a, b)),
    "jax.scipy.stats.truncnorm.logpdf": ("u", lambda u: jsp.stats.truncnorm.logpdf(u, -1.0, 2.0)),
    "jax.scipy.stats.multivariate_normal.logpdf": ("ms", lambda m, s: jsp.stats.multivariate_normal.logpdf(m, m[0], s)),
    "jax.scipy.stats.dirichlet.logpdf": ("p", lambda p: jsp.stats.dirichlet.logpdf((p / p.sum(0))[:, 0], p[:, 1])),
    "jax.scipy.stats.gaussian_kde": ("vw", lambda v, w: jsp.stats.gaussian_kde(v).evaluate(w)),
    "jax.scipy.ndimage.map_coordinates": ("mff", lambda m, x, y: jsp.ndimage.map_coordinates(m, [x, y], 1, "nearest")),
    "jax.scipy.interpolate.RegularGridInterpolator": (
        "mu",
        lambda m, u: jsp.interpolate.RegularGridInterpolator((jnp.arange(4.0), jnp.arange(4.0)), m)(u[:, :2] * 3),
    ),
    "jax.scipy.integrate.trapezoid": ("f", jsp.integrate.trapezoid),
    "jax.scipy.cluster.vq": ("fm", lambda x, m: jsp.cluster.vq.vq(x[:, :4], m)),
    "jax.scipy.sparse.linalg.cg": ("sv", lambda s, v: jsp.sparse.linalg.cg(s, v[:4], maxiter=3)[0]),
    "jax.scipy.sparse.linalg.gmres": ("lv", lambda a, v: jsp.sparse.linalg.gmres(a, v[:4], maxiter=2)[0]),
    "jax.scipy.sparse.linalg.bicgstab": ("lv", lambda a, v: jsp.sparse.linalg.bicgstab(a, v[:4], maxiter=2)[0]),
    "jax.scipy.optimize.minimize": (
        "v",
        lambda v: (
            jsp.optimize.minimize(
                lambda x: ((x - 1) ** 2 * jnp.arange(1.0, 8.0)).sum(), v, method="BFGS", options={"maxiter": 3}
            ).x
        ),
    ),
    "jax.scipy.spatial.transform.Rotation": (
        "f",
        lambda x: jsp.spatial.transform.Rotation.from_rotvec(x[:, :3]).as_matrix(),
    ),
    "grad": ("v", jax.grad(lambda v: jnp.tanh(v).sum())),
    "hessian": ("v", jax.hessian(lambda v: (v**3).prod())),
    "vmap(cond)": ("vw", jax.vmap(lambda a, b: lax.cond(a > b, lambda: a * b, lambda: a - b))),
    "checkpoint": ("v", jax.grad(jax.checkpoint(lambda v: jnp.sin(jnp.cos(v)).sum()))),
}

CALLS = {**LAX, **NUMPY, **OTHERS}


def _image(layout: str = "NCHW") -> jax.Array:
    x = jnp.sin(jnp.arange(2 * 3 * 6 * 5, dtype=jnp.float32)).reshape(2, 3, 6, 5)
    return x if layout == "NCHW" else x.transpose(0, 2, 3, 1)


def _kernel(layout: str = "HWIO") -> jax.Array:
    k = jnp.cos(jnp.arange(2 * 3 * 3 * 4, dtype=jnp.float32)).reshape(2, 3, 3, 4)
    return k if layout == "HWIO" else k.transpose(3, 2, 0, 1)


def _heads(n: int) -> jax.Array:
    return jnp.sin(n + jnp.arange(2 * 6 * 2 * 4, dtype=jnp.float32)).reshape(2, 6, 2, 4)


def _local_convolution() -> jax.Array:
    x, k = _image(), jnp.cos(jnp.arange(4 * 3 * 4 * 5 * 4, dtype=jnp.float32)).reshape(4, 12, 5, 4)
    return lax.conv_general_dilated_local(x, k, (1, 1), "VALID", (2, 2))
