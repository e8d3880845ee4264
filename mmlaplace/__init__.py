"""LaplacianFormer for OpenMMLab: linear attention with the Laplacian kernel."""
from .version import __version__

__all__ = ['__version__']
