"""Models of mmlaplace. They need mmengine and mmcv beside torch."""
from .laplacian_attention import LaplacianAttention
from .laplacianformer import LaplacianFormer

__all__ = ['LaplacianAttention', 'LaplacianFormer']
