"""Landmarks: few points that stand for many keys."""
from typing import Tuple

from torch import Tensor

from . import reference
from .arguments import check_tensors, compute_in_float32


def pool_landmarks(keys: Tensor, size: Tuple[int, int],
                   grid: Tuple[int, int]) -> Tensor:
    """Average keys over the cells of a grid.

    The cells are those of 2-D adaptive average pooling; together they cover
    every key.

    Args:
        keys (Tensor): ``(..., height * width, d)`` in row-major order, in
            float16, bfloat16, float32 or float64.
        size (tuple[int]): Height and width in tokens.
        grid (tuple[int]): Cells down and across, from 1 to ``size``.

    Returns:
        Tensor: ``(..., grid[0] * grid[1], d)``, computed in float32 (float64
        for float64 input, also under autocast), in the dtype of ``keys``.

    Raises:
        TypeError: If ``keys`` is no tensor of one of these dtypes.
        ValueError: If ``size`` does not fit the keys, or ``grid`` the size.
    """
    check_tensors(keys=keys)
    if len(size) != 2 or size[0] * size[1] != keys.shape[-2]:
        raise ValueError(f'size must be the height and width of the '
                         f'{keys.shape[-2]} tokens, got {size}')
    if len(grid) != 2 or not all(
            1 <= cells <= side for cells, side in zip(grid, size)):
        raise ValueError(f'grid must be two numbers from 1 to size '
                         f'{tuple(size)}, got {grid}')
    return compute_in_float32(
        reference.pool_landmarks, keys, size=size, grid=grid)
