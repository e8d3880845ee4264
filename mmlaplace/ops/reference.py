"""The truth every backend is held to: the formulas in plain torch.

Inputs are taken as they come, in one dtype that is exact enough to compute
in. The entry points beside this file check arguments and choose the dtype;
``ops/README.md`` derives the formulas.
"""
import math
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

# On CUDA the backward of `torch.cdist` holds one float for each query, key
# and channel. Query blocks of this many elements bound that buffer.
_CDIST_BLOCK_ELEMENTS = 2**24


def l1_distance(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute ``(..., N, M)`` distances sum_c |queries_c - keys_c|."""
    if torch.onnx.is_in_onnx_export():
        # ONNX has no such operator, and inputs of any size.
        return (queries[..., None, :] - keys[..., None, :, :]).abs().sum(-1)
    batch_shape = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
    per_query = max(batch_shape.numel() * keys.shape[-2:].numel(), 1)
    block = max(_CDIST_BLOCK_ELEMENTS // per_query, 1)
    if queries.shape[-2] <= block:
        return torch.cdist(queries, keys, p=1)
    if queries.shape[-2] < keys.shape[-2]:
        # Every block adds to the gradient of all keys: split the many.
        return l1_distance(keys, queries).mT
    return torch.cat(
        [torch.cdist(part, keys, p=1) for part in queries.split(block, -2)],
        dim=-2)


def laplacian_kernel(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Compute exp(-||q - k||_1 / scale) for every query and key."""
    return torch.exp(l1_distance(queries, keys) / -scale)


def gaussian_kernel(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Compute exp(-||q - k||_2^2 / (2 scale^2)) for every query and key."""
    # Centred on the keys, so that the squared norms that cancel stay small.
    # The result does not depend on the centre, hence the detach.
    centre = keys.detach().sum(-2, keepdim=True) / max(keys.shape[-2], 1)
    queries, keys = queries - centre, keys - centre
    squared_distance = (
        queries.square().sum(-1, keepdim=True) +
        keys.square().sum(-1, keepdim=True).mT - 2 * queries @ keys.mT)
    return torch.exp(squared_distance.clamp(min=0) / (-2 * scale**2))


KERNELS = {'laplacian': laplacian_kernel, 'gaussian': gaussian_kernel}


def rotary_embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + d / 2) of ``(..., N, h, d)`` tokens."""
    cosine, sine = table[:, :, None]
    first, second = tokens.chunk(2, dim=-1)
    return torch.cat([
        torch.addcmul(first * cosine, second, sine, value=-1),
        torch.addcmul(first * sine, second, cosine)
    ], -1)


def pooling_matrix(size: int, bins: int, like: Tensor) -> Tensor:
    """Build the ``(bins, size)`` matrix of 1-D adaptive average pooling.

    Bin i averages the positions from floor(i size / bins) up to, not
    including, ceil((i + 1) size / bins).
    """
    position = torch.arange(size, device=like.device)
    index = torch.arange(bins, device=like.device)[:, None]
    start = index * size // bins
    end = ((index + 1) * size + bins - 1) // bins
    inside = (position >= start) & (position < end)
    return inside.to(like.dtype) / (end - start).to(like.dtype)


def pool_landmarks(keys: Tensor, size: Tuple[int, int],
                   grid: Tuple[int, int]) -> Tensor:
    """Average the keys of each cell of a grid."""
    (height, width), (rows, columns) = size, grid
    leading, dims = keys.shape[:-2], keys.shape[-1]
    # As two matrix products the pooling is deterministic on every device.
    pooled = pooling_matrix(height, rows, keys) @ keys.reshape(
        *leading, height, width * dims)
    pooled = pooling_matrix(width, columns, keys) @ pooled.reshape(
        *leading, rows, width, dims)
    return pooled.reshape(*leading, rows * columns, dims)


def add_to_diagonal(matrix: Tensor, value: float) -> Tensor:
    """Compute matrix + value * I."""
    return matrix + value * torch.eye(
        matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def newton_schulz_inverse(matrix: Tensor, num_iters: int, eps: float,
                          positive_definite: bool) -> Tensor:
    """Invert ``A = matrix + eps * I`` by X <- X + X (I - A X)."""
    if matrix.numel() == 0:
        return matrix
    identity = torch.eye(
        matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    matrix = matrix + eps * identity
    # The iteration runs on a matrix of unit Frobenius norm: it bounds the
    # largest singular value, is smooth everywhere (the 1- and inf-norms have
    # kinks at ties, where a truncated iteration has no gradient), and keeps
    # every product in range. The result does not depend on `largest`, hence
    # the detach. The floor makes a zero matrix yield its pseudo-inverse, 0.
    limits = torch.finfo(matrix.dtype)
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    largest = largest.clamp(min=limits.tiny)
    matrix = matrix / largest
    if positive_definite:
        # A symmetric matrix stays so, also under a perturbation.
        matrix = (matrix + matrix.mT) / 2
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    norm = norm.clamp(min=limits.tiny)
    matrix = matrix / norm
    inverse = identity.expand_as(matrix) if positive_definite else matrix.mT

    # In exact arithmetic the residual falls at every step. Where rounding
    # makes it rise, the limit of the dtype is reached and the matrix rests;
    # so it does after a step from which, being quadratic, no more than
    # rounding can be left.
    precise = math.sqrt(limits.eps) / matrix.shape[-1]
    active = torch.ones((), dtype=torch.bool, device=matrix.device)
    last_residual = float('inf')
    for _ in range(num_iters):
        error = identity - matrix @ inverse
        residual = error.detach().abs().amax((-2, -1), keepdim=True)
        active = active & (residual <= 1.1 * last_residual)
        inverse = inverse + torch.where(active, inverse @ error, 0.0)
        active = active & (residual > precise)
        last_residual = residual
    return (inverse / norm / largest).clamp(limits.min, limits.max)


def newton_schulz_residual(matrix: Tensor, inverse: Tensor,
                           eps: float) -> Tensor:
    """Compute ||I - (matrix + eps I) inverse||_F of every matrix."""
    product = add_to_diagonal(matrix, eps) @ inverse
    return torch.linalg.vector_norm(
        add_to_diagonal(-product, 1.0), dim=(-2, -1))


def conjugate_gradient(matrix: Tensor, right: Tensor,
                       num_iters: int) -> Tensor:
    """Solve ``matrix @ x = right`` for symmetric positive definite matrices.

    Each column of ``right`` is a system of its own (Hestenes and Stiefel,
    1952).
    """
    solution = torch.zeros_like(right)
    residual = direction = right
    power = residual.square().sum(-2, keepdim=True)
    # A solved column rests: its step would be 0 / 0.
    floor = torch.finfo(right.dtype).eps**2 * power.detach()
    for _ in range(num_iters):
        active = power > floor
        product = matrix @ direction
        curvature = (direction * product).sum(-2, keepdim=True)
        step = torch.where(active, power, 0.0) / torch.where(
            active, curvature, 1.0)
        solution = solution + step * direction
        residual = residual - step * product
        last_power = power
        power = residual.square().sum(-2, keepdim=True)
        direction = residual + direction * torch.where(
            active, power, 0.0) / torch.where(active, last_power, 1.0)
    return solution


SOLVERS = ('newton_schulz', 'conjugate_gradient', 'exact')


def solve(matrix: Tensor, right: Tensor, solver: str, num_iters: int,
          eps: float, positive_definite: bool) -> Tensor:
    """Solve ``(matrix + eps * I) @ x = right``."""
    if solver == 'newton_schulz':
        return newton_schulz_inverse(matrix, num_iters, eps,
                                     positive_definite) @ right
    damped = add_to_diagonal(matrix, eps)
    if solver == 'exact':
        return torch.linalg.solve(damped, right)
    return conjugate_gradient(damped, right, num_iters)


def laplacian_attention(queries: Tensor, keys: Tensor, values: Tensor,
                        landmarks: Optional[Tensor],
                        query_landmarks: Optional[Tensor],
                        gain: Optional[Tensor], scale: float,
                        kernel_function: Callable[..., Tensor],
                        whitening: str, solver: str, num_iters: int,
                        eps: float) -> Tensor:
    """Compute whitened Nystroem attention without an N x M matrix."""
    num_queries, num_keys = queries.shape[-2], keys.shape[-2]

    if landmarks is None:
        # P^-1 C_k is the identity: the kernel matrix itself, no solve.
        query_kernel = kernel_function(queries, keys, scale)
        weights = None
    else:
        query_kernel = kernel_function(queries, landmarks, scale)
        left = landmarks if query_landmarks is None else query_landmarks
        weights = solve(
            kernel_function(left, landmarks, scale),
            kernel_function(left, keys, scale),
            solver,
            num_iters,
            eps,
            positive_definite=query_landmarks is None)

    mixed = values
    if whitening != 'none':
        centred = query_kernel - query_kernel.mean(-2, keepdim=True)
        if weights is None:
            variance = centred.square().sum(-2) / max(num_queries, 1)
        else:
            covariance = centred.mT @ centred / max(num_queries, 1)
            variance = (weights * (covariance @ weights)).sum(-2)
            # Below zero only by rounding.
            variance = variance.clamp(min=0)
        mixed = values * torch.rsqrt(variance + eps)[..., None]
        # Centring the weighted values subtracts the row mean of the kernel.
        mixed = mixed - mixed.mean(-2, keepdim=True)

    output = query_kernel @ (mixed if weights is None else weights @ mixed)
    if whitening != 'literal':
        factor = 1 / num_keys
        if gain is not None:
            factor = gain.to(output.dtype)[..., None, None] * factor
        output = output * factor
    return output + values.mean(-2, keepdim=True)
