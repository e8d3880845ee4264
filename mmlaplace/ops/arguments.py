"""What the entry points share: argument checks and the working precision."""
import math
from contextlib import nullcontext
from functools import reduce
from typing import Callable, List, Optional

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(**tensors: Tensor) -> None:
    """Require floating tensors of two or more dimensions on one device.

    Raises:
        TypeError: If an argument is no tensor or has another dtype.
        ValueError: If it has fewer dimensions or lies on another device.
    """
    devices = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f'{name} must be a tensor, got {type(tensor)}')
        if tensor.dtype not in _DTYPES:
            raise TypeError(f'{name} must have one of the dtypes '
                            f'{", ".join(map(str, _DTYPES))}, '
                            f'got {tensor.dtype}')
        if tensor.dim() < 2:
            raise ValueError(f'{name} must have 2 or more dimensions, '
                             f'got shape {tuple(tensor.shape)}')
        devices[name] = tensor.device
    if len(set(devices.values())) > 1:
        raise ValueError(f'all tensors must lie on one device, got {devices}')


def check_same_size(dim: int, **tensors: Tensor) -> None:
    """Require tensors that agree in the size of one dimension."""
    # Compared, not hashed: under torch.jit.trace sizes are tensors.
    first, *others = (tensor.shape[dim] for tensor in tensors.values())
    if any(other != first for other in others):
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        raise ValueError(f'{", ".join(tensors)} must agree in dimension '
                         f'{dim}, got shapes {shapes}')


def check_positive(**values: float) -> None:
    """Require finite numbers above zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f'{name} must be finite and above 0, got {value}')


def check_num_iters(num_iters: int) -> None:
    """Require a count of 0 or above."""
    if num_iters < 0:
        raise ValueError(f'num_iters must be 0 or above, got {num_iters}')


def check_choice(allowed, **values: str) -> None:
    """Require each value to be one of ``allowed``."""
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f'{name} must be one of '
                             f'{", ".join(map(repr, allowed))}, got {value!r}')


def compute_in_float32(function: Callable[..., Tensor],
                       *tensors: Optional[Tensor], **options) -> Tensor:
    """Call ``function`` in float32, or in float64 where a tensor has it.

    Also under autocast. A tensor may be None. The result has the dtype that
    the tensors promote to: float16 and bfloat16 come back as they went in.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in given))
    compute_dtype = torch.promote_types(dtype, torch.float32)
    device_type = given[0].device.type
    # Nothing is computed on the meta device, which autocast does not know.
    context = (nullcontext() if device_type == 'meta' else torch.autocast(
        device_type, enabled=False))
    with context:
        result = function(
            *(tensor if tensor is None else tensor.to(compute_dtype)
              for tensor in tensors), **options)
    return result.to(dtype)


def unify(*tensors: Tensor) -> List[Tensor]:
    """Give tensors ``(..., n, d)`` one dtype and equal leading dimensions."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    leading = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    return [
        tensor.to(dtype).expand(*leading, *tensor.shape[-2:])
        for tensor in tensors
    ]
