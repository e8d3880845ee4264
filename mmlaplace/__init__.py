"""LaplacianFormer for OpenMMLab: attention with the Laplacian kernel."""
from .version import __version__

__all__ = ['__version__']
