"""Positions, as rotations of queries and keys."""
import torch
from torch import Tensor

from . import reference
from .arguments import check_tensors
from .backend import use_native


def rotary_embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + d / 2) by the angles of their tokens.

    Rotary embedding (Su et al., arXiv 2104.09864). On CUDA it is computed in
    plain torch, which ``torch.compile`` makes one kernel of.

    Args:
        tokens (Tensor): ``(..., N, h, d)`` in float16, bfloat16, float32 or
            float64, d even.
        table (Tensor): Cosines and sines ``(2, N, d / 2)`` in float32 or
            float64. No gradient is computed of it.

    Returns:
        Tensor: ``(..., N, h, d)`` in the dtype that tokens and table promote
        to, so in float32 for half precision.

    Raises:
        TypeError: If an argument is no tensor of one of these dtypes.
        ValueError: If the shapes do not fit.
    """
    check_tensors(tokens=tokens, table=table)
    if table.dtype not in (torch.float32, torch.float64):
        raise TypeError('table must be in float32 or float64, '
                        f'got {table.dtype}')
    if tokens.dim() < 3 or table.shape != (2, tokens.shape[-3],
                                           tokens.shape[-1] / 2):
        raise ValueError('table must have shape (2, N, d / 2) for tokens '
                         f'(..., N, h, d), got {tuple(table.shape)} for '
                         f'{tuple(tokens.shape)}')
    table = table.detach().to(
        torch.promote_types(tokens.dtype, table.dtype))
    if tokens.device.type == 'cpu' and use_native('cpu'):
        return torch.ops.mmlaplace.rotary_embedding(tokens, table, False)
    return reference.rotary_embedding(tokens, table)
