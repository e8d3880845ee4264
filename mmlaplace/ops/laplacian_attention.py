"""Linear attention with the Laplacian kernel."""
from typing import Optional

import torch
from torch import Tensor

from . import reference
from .arguments import (
    check_choice,
    check_num_iters,
    check_positive,
    check_same_size,
    check_tensors,
    compute_in_float32,
    unify,
)
from .backend import use_native
from .laplacian_kernel import kernel_function

WHITENINGS = ('scaled', 'literal', 'none')


def check_attention_options(scale: float, kernel: str, whitening: str,
                            solver: str, num_iters: int, eps: float) -> None:
    """Require options that :func:`laplacian_attention` can compute with.

    Raises:
        ValueError: If one is out of range; the message names it.
    """
    check_positive(scale=scale, eps=eps)
    check_choice(reference.KERNELS, kernel=kernel)
    check_choice(WHITENINGS, whitening=whitening)
    check_choice(reference.SOLVERS, solver=solver)
    check_num_iters(num_iters)


def _fused_attention(queries: Tensor, keys: Tensor, values: Tensor,
                     landmarks: Optional[Tensor], gain: Optional[Tensor],
                     scale: float, whitening: str, num_iters: int,
                     eps: float) -> Tensor:
    if landmarks is None:
        tensors = unify(queries, keys, values)
    else:
        tensors = unify(queries, keys, values, landmarks)
    if gain is None:
        gain = queries.new_ones(())
    gain = gain.expand(tensors[0].shape[:-2])
    if landmarks is None:
        return torch.ops.mmlaplace.exact_laplacian_attention(
            *tensors, gain, scale, whitening, eps)[0]
    return torch.ops.mmlaplace.laplacian_attention(*tensors, gain, scale,
                                                   whitening, num_iters,
                                                   eps)[0]


def laplacian_attention(queries: Tensor,
                        keys: Tensor,
                        values: Tensor,
                        landmarks: Optional[Tensor] = None,
                        query_landmarks: Optional[Tensor] = None,
                        gain: Optional[Tensor] = None,
                        scale: float = 4.0,
                        kernel: str = 'laplacian',
                        whitening: str = 'scaled',
                        solver: str = 'newton_schulz',
                        num_iters: int = 12,
                        eps: float = 1e-3) -> Tensor:
    r"""Whitened Nystroem attention in time linear in the tokens.

    With :math:`\kappa` the kernel, L the landmarks and
    :math:`P = \kappa(L, L) + \epsilon I`, the kernel matrix of all queries
    and keys is approximated by
    :math:`G = \kappa(q, L)\,P^{-1}\kappa(L, k)`, an N x M matrix that is
    never formed, and the result is

    .. math::
        o_i = \frac{g}{M} \sum_j D_j \Big(G_{ij} -
              \frac{1}{M} \sum_l G_{il}\Big) v_j + \frac{1}{M} \sum_j v_j,
        \qquad D_j = \frac{1}{\sqrt{\mathrm{Var}_i\,G_{ij} + \epsilon}}

    after LaplacianFormer (arXiv 2604.20368); ``ops/README.md`` shows how the
    variance is had exactly in linear time. Statistics are those of one
    leading index (image and head), never of the batch. There is no mask.

    Args:
        queries (Tensor): ``(..., N, d)`` in float16, bfloat16, float32 or
            float64.
        keys (Tensor): ``(..., M, d)`` with M of 1 or more.
        values (Tensor): ``(..., M, e)``.
        landmarks (Tensor, optional): ``(..., m, d)``. None takes the keys
            themselves, for which G is the exact kernel matrix and nothing is
            inverted; the cost is then N M d.
        query_landmarks (Tensor, optional): ``(..., m, d)`` landmarks of the
            queries, which take the place of L in the rows of P and in
            :math:`\kappa(L, k)`, as the paper's text reads. P is then neither
            symmetric nor well conditioned. Defaults to None.
        gain (Tensor, optional): The factor g, broadcast to the leading
            dimensions, such as ``(heads,)``; its dtype does not lift that of
            the result. None means 1.
        scale (float): Length scale of the kernel. Defaults to 4.0.
        kernel (str): 'laplacian' or 'gaussian'. Defaults to 'laplacian'.
        whitening (str): 'scaled' as above; 'literal' with g / M = 1 as
            published, which grows like the square root of M; 'none' with
            ``G v`` in place of the whitened sum. Defaults to 'scaled'.
        solver (str): How the inverse of P is applied: 'newton_schulz';
            'conjugate_gradient', for symmetric P only; or 'exact', by LU
            factorization. Defaults to 'newton_schulz'.
        num_iters (int): Iterations of the solver. Defaults to 12.
        eps (float): The :math:`\epsilon` above 0 of P and D.
            Defaults to 1e-3.

    Returns:
        Tensor: ``(..., N, e)``, computed in float32 (float64 for float64
        input, also under autocast) and returned in the dtype that the
        tensors promote to.

    Raises:
        TypeError: If an argument is no tensor of one of these dtypes.
        ValueError: If shapes, devices or options do not fit.
    """
    tensors = dict(queries=queries, keys=keys, values=values)
    points = dict(queries=queries, keys=keys)
    if landmarks is not None:
        tensors['landmarks'] = points['landmarks'] = landmarks
    if query_landmarks is not None:
        tensors['query_landmarks'] = query_landmarks
        points['query_landmarks'] = query_landmarks
    check_tensors(**tensors)
    check_same_size(-1, **points)
    check_same_size(-2, keys=keys, values=values)
    for name in set(points) - {'queries'}:
        if points[name].shape[-2] == 0:
            raise ValueError(f'{name} must hold 1 token or more, '
                             f'got shape {tuple(points[name].shape)}')
    check_attention_options(scale, kernel, whitening, solver, num_iters, eps)
    if query_landmarks is not None:
        if landmarks is None:
            raise ValueError('query_landmarks need landmarks, got None')
        check_same_size(
            -2, landmarks=landmarks, query_landmarks=query_landmarks)
        if solver == 'conjugate_gradient':
            raise ValueError("solver 'conjugate_gradient' needs a symmetric "
                             'P, so no query_landmarks')
    device_type = queries.device.type
    # That of the keys themselves is fused on CPU only.
    fused = query_landmarks is None and kernel == 'laplacian' and (
        solver == 'newton_schulz'
        if landmarks is not None else device_type == 'cpu')
    if fused and use_native(device_type):
        return _fused_attention(queries, keys, values, landmarks, gain, scale,
                                whitening, num_iters, eps)
    return compute_in_float32(
        reference.laplacian_attention,
        queries,
        keys,
        values,
        landmarks,
        query_landmarks,
        gain=gain,
        scale=scale,
        kernel_function=kernel_function(kernel, device_type),
        whitening=whitening,
        solver=solver,
        num_iters=num_iters,
        eps=eps)
