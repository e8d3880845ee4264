"""Kernel matrices between two sets of points."""
from typing import Callable

import torch
from torch import Tensor

from . import reference
from .arguments import (
    check_positive,
    check_same_size,
    check_tensors,
    compute_in_float32,
    unify,
)
from .backend import use_native


def _native_laplacian_kernel(queries: Tensor, keys: Tensor,
                             scale: float) -> Tensor:
    return torch.ops.mmlaplace.laplacian_kernel(*unify(queries, keys), scale)


def kernel_function(kernel: str, device_type: str) -> Callable[..., Tensor]:
    """Return what computes a kernel matrix, for float32 or float64 tensors."""
    if kernel == 'laplacian' and use_native(device_type):
        return _native_laplacian_kernel
    return reference.KERNELS[kernel]


def _check(queries: Tensor, keys: Tensor, scale: float) -> None:
    check_tensors(queries=queries, keys=keys)
    check_same_size(-1, queries=queries, keys=keys)
    check_positive(scale=scale)


def laplacian_kernel(queries: Tensor,
                     keys: Tensor,
                     scale: float = 4.0) -> Tensor:
    """Laplacian kernel exp(-||q - k||_1 / scale) of every query and key.

    The kernel of LaplacianFormer (arXiv 2604.20368), there with scale 4.
    Memory is that of the result times a small constant; the distance is never
    expanded over channels. At equal coordinates the gradient is 0.

    Args:
        queries (Tensor): ``(..., N, d)`` in float16, bfloat16, float32 or
            float64.
        keys (Tensor): ``(..., M, d)``; leading dimensions broadcast.
        scale (float): Length above 0 at which the kernel falls to 1/e.
            Defaults to 4.0.

    Returns:
        Tensor: ``(..., N, M)`` with values in [0, 1], computed in float32
        (float64 for float64 input, also under autocast) and returned in the
        dtype that queries and keys promote to.

    Raises:
        TypeError: If an argument is no tensor of one of these dtypes.
        ValueError: If shapes, devices or scale do not fit.
    """
    _check(queries, keys, scale)
    if use_native(queries.device.type):
        return _native_laplacian_kernel(queries, keys, scale)
    return compute_in_float32(
        reference.laplacian_kernel, queries, keys, scale=scale)


def gaussian_kernel(queries: Tensor,
                    keys: Tensor,
                    scale: float = 4.0) -> Tensor:
    """Gaussian kernel exp(-||q - k||_2^2 / (2 scale^2)), for comparison.

    Arguments, result and errors are those of :func:`laplacian_kernel`; scale
    is the standard deviation.
    """
    _check(queries, keys, scale)
    return compute_in_float32(
        reference.gaussian_kernel, queries, keys, scale=scale)
