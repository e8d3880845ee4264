"""Operators of LaplacianFormer. They need torch alone."""
from .landmarks import pool_landmarks
from .laplacian_attention import laplacian_attention
from .laplacian_kernel import gaussian_kernel, laplacian_kernel
from .newton_schulz import newton_schulz_inverse, newton_schulz_residual
from .rotary_embedding import rotary_embedding

__all__ = [
    'gaussian_kernel', 'laplacian_attention', 'laplacian_kernel',
    'newton_schulz_inverse', 'newton_schulz_residual', 'pool_landmarks',
    'rotary_embedding'
]
