"""Matrix inverse by the Newton-Schulz iteration."""
import torch
from torch import Tensor

from . import reference
from .arguments import (
    check_num_iters,
    check_same_size,
    check_tensors,
    compute_in_float32,
)
from .backend import use_native


def _check_square(matrix: Tensor) -> None:
    if matrix.shape[-2] != matrix.shape[-1]:
        raise ValueError('matrix must be square in its last two dimensions, '
                         f'got shape {tuple(matrix.shape)}')


def _check_eps(eps: float) -> None:
    if not 0 <= eps < float('inf'):
        raise ValueError(f'eps must be finite and 0 or above, got {eps}')


def newton_schulz_inverse(matrix: Tensor,
                          num_iters: int = 12,
                          eps: float = 1e-3,
                          positive_definite: bool = False) -> Tensor:
    r"""Inverse of ``A = matrix + eps * I`` by ``X <- X (2I - A X)``.

    The start is :math:`A^T / \|A\|_F^2`, from which the iteration converges
    for every invertible matrix (Schulz 1933; Ben-Israel and Cohen 1966), or
    :math:`I / \|A\|_F`, which needs about half the iterations and is right
    for symmetric positive definite matrices only. The number of iterations
    wanted grows with the binary logarithm of the condition number; what was
    reached is read with :func:`newton_schulz_residual`. A matrix whose
    residual begins to rise, since its dtype holds no better inverse, rests
    there, so finite input gives finite output. The gradient is that of the
    iterations computed, converged or not.

    Args:
        matrix (Tensor): ``(..., m, m)`` in float16, bfloat16, float32 or
            float64.
        num_iters (int): Iterations, 0 or more. Defaults to 12.
        eps (float): Damping added to the diagonal, 0 or above.
            Defaults to 1e-3.
        positive_definite (bool): Whether every ``A`` is symmetric positive
            definite. Defaults to False.

    Returns:
        Tensor: ``(..., m, m)``, computed in float32 (float64 for float64
        input, also under autocast), in the dtype of ``matrix``.

    Raises:
        TypeError: If ``matrix`` is no tensor of one of these dtypes.
        ValueError: If it is not square, or another argument is out of range.
    """
    check_tensors(matrix=matrix)
    _check_square(matrix)
    _check_eps(eps)
    check_num_iters(num_iters)
    if use_native(matrix.device.type):
        return torch.ops.mmlaplace.newton_schulz_inverse(
            matrix, num_iters, eps, positive_definite)
    return compute_in_float32(
        reference.newton_schulz_inverse,
        matrix,
        num_iters=num_iters,
        eps=eps,
        positive_definite=positive_definite)


def newton_schulz_residual(matrix: Tensor,
                           inverse: Tensor,
                           eps: float = 1e-3) -> Tensor:
    r"""Residual :math:`\|I - (matrix + eps I)\,inverse\|_F` of each matrix.

    Below 1 it proves that ``matrix + eps I`` is invertible and that further
    iterations converge.

    Args:
        matrix (Tensor): ``(..., m, m)``, as given to
            :func:`newton_schulz_inverse`.
        inverse (Tensor): ``(..., m, m)``, as returned by it.
        eps (float): The damping used there. Defaults to 1e-3.

    Returns:
        Tensor: ``(...)``, in the dtype that both promote to.

    Raises:
        TypeError: If an argument is no tensor of a supported dtype.
        ValueError: If shapes, devices or eps do not fit.
    """
    check_tensors(matrix=matrix, inverse=inverse)
    _check_square(matrix)
    _check_eps(eps)
    check_same_size(-1, matrix=matrix, inverse=inverse)
    check_same_size(-2, matrix=matrix, inverse=inverse)
    return compute_in_float32(
        reference.newton_schulz_residual, matrix, inverse, eps=eps)
