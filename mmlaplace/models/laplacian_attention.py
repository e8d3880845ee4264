"""The attention layer of LaplacianFormer."""
from typing import Optional, Sequence, Tuple

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import laplacian_attention, pool_landmarks, rotary_embedding
from ..ops.arguments import check_choice
from ..ops.laplacian_attention import check_attention_options

LANDMARK_SOURCES = ('keys', 'queries_and_keys')
_ROPE_BASE = 100.0


def rotary_table(size: Tuple[int, int], dims: int, like: Tensor) -> Tensor:
    """Build cosines and sines of 2-D rotary embedding (RoPE).

    Half of the ``dims / 2`` channel pairs turn with the row, half with the
    column, by position * base^(-i / (dims / 4)) radians (Su et al., arXiv
    2104.09864; axial form and base 100 of Heo et al., arXiv 2403.13298). It
    depends on positions alone, so any image size works.

    Args:
        size (tuple[int]): Height and width in tokens.
        dims (int): Channels per head, a multiple of 4.
        like (Tensor): Gives the device, and float64 where it has it.

    Returns:
        Tensor: ``(2, height * width, dims / 2)`` in float32 or float64.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    height, width = size
    frequency = _ROPE_BASE**(
        -torch.arange(dims // 4, dtype=dtype, device=like.device) /
        (dims // 4))
    rows = torch.arange(height, dtype=dtype, device=like.device)
    columns = torch.arange(width, dtype=dtype, device=like.device)
    angles = torch.cat([
        (rows[:, None] * frequency)[:, None].expand(-1, width, -1),
        (columns[:, None] * frequency)[None].expand(height, -1, -1),
    ], -1).flatten(0, 1)
    return torch.stack([angles.cos(), angles.sin()])


class LaplacianAttention(BaseModule):
    """Multi-head linear attention with the Laplacian kernel.

    The whitened kernel sum of :func:`mmlaplace.ops.laplacian_attention`, to
    which a 3x3 depthwise convolution of the values is added before the output
    projection. Landmarks are average-pooled keys. Where the grid is no
    coarser than the feature map, the keys themselves are the landmarks and
    the kernel matrix is exact.

    Args:
        embed_dims (int): Channels.
        num_heads (int): Heads; the channels per head must be a multiple of
            4 where ``rope`` is set.
        landmark_grid (Sequence[int]): Landmarks down and across, at any
            feature map size. Defaults to ``(7, 7)``.
        landmark_ratio (int, optional): Takes the place of ``landmark_grid``
            where given: tokens per landmark down and across. The number of
            landmarks then grows with the image. Defaults to None.
        landmark_source (str): 'keys', whose averages serve both sides of
            the kernel, or 'queries_and_keys' with averages of each, as the
            paper's text reads. Defaults to 'keys'.
        scale (float): Length scale of the kernel. Defaults to 4.0.
        solver (str): 'newton_schulz', 'conjugate_gradient' or 'exact'.
            Defaults to 'newton_schulz'.
        num_iters (int): Iterations of the solver. Defaults to 12.
        eps (float): Damping of landmark kernel and whitening.
            Defaults to 1e-3.
        whitening (str): 'scaled', 'literal' or 'none'.
            Defaults to 'scaled'.
        kernel (str): 'laplacian' or 'gaussian'; or 'softmax' for ordinary
            scaled dot product attention, in time quadratic in the tokens, as
            a comparison. It has no landmarks, gain or whitening.
            Defaults to 'laplacian'.
        rope (bool): Whether rotary embedding is applied to queries and keys.
            Defaults to True.
        init_cfg (dict, optional): Initialization config. Defaults to None.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self,
                 embed_dims: int,
                 num_heads: int,
                 landmark_grid: Sequence[int] = (7, 7),
                 landmark_ratio: Optional[int] = None,
                 landmark_source: str = 'keys',
                 scale: float = 4.0,
                 solver: str = 'newton_schulz',
                 num_iters: int = 12,
                 eps: float = 1e-3,
                 whitening: str = 'scaled',
                 kernel: str = 'laplacian',
                 rope: bool = True,
                 init_cfg: Optional[dict] = None):
        super().__init__(init_cfg)
        if embed_dims % num_heads:
            raise ValueError(f'embed_dims must be a multiple of num_heads, '
                             f'got {embed_dims} and {num_heads}')
        if rope and embed_dims // num_heads % 4:
            raise ValueError('embed_dims / num_heads must be a multiple of 4 '
                             f'for rope, got {embed_dims} / {num_heads}')
        if len(landmark_grid) != 2 or min(landmark_grid) < 1:
            raise ValueError('landmark_grid must be two numbers of 1 or more,'
                             f' got {landmark_grid}')
        if landmark_ratio is not None and landmark_ratio < 1:
            raise ValueError('landmark_ratio must be 1 or more, '
                             f'got {landmark_ratio}')
        check_choice(
            LANDMARK_SOURCES, landmark_source=landmark_source)
        self.softmax = kernel == 'softmax'
        check_attention_options(scale,
                                'laplacian' if self.softmax else kernel,
                                whitening, solver, num_iters, eps)
        if (landmark_source, solver) == ('queries_and_keys',
                                         'conjugate_gradient'):
            raise ValueError("solver 'conjugate_gradient' needs "
                             "landmark_source 'keys', got 'queries_and_keys'")
        self.num_heads = num_heads
        self.head_dims = embed_dims // num_heads
        self.landmark_grid = tuple(landmark_grid)
        self.landmark_ratio = landmark_ratio
        self.landmark_source = landmark_source
        self.rope = rope
        self.options = dict(
            scale=scale,
            solver=solver,
            num_iters=num_iters,
            eps=eps,
            whitening=whitening,
            kernel=kernel)
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims)
        self.local = nn.Conv2d(
            embed_dims, embed_dims, 3, padding=1, groups=embed_dims)
        # One-dimensional, so that `flat_decay_mult=0` exempts it from decay.
        # The literal form and softmax have no gain.
        self.gain = None if whitening == 'literal' or self.softmax else (
            nn.Parameter(torch.ones(num_heads)))
        self.proj = nn.Linear(embed_dims, embed_dims)

    def landmark_size(self, size: Tuple[int, int]) -> Tuple[int, int]:
        """Return the landmarks down and across for a feature map size."""
        if self.landmark_ratio is not None:
            return tuple(-(-side // self.landmark_ratio) for side in size)
        return tuple(
            min(side, cells) for side, cells in zip(size, self.landmark_grid))

    def forward(self,
                x: Tensor,
                size: Tuple[int, int],
                table: Optional[Tensor] = None) -> Tensor:
        """Attend over the tokens of each image.

        Args:
            x (Tensor): ``(B, height * width, embed_dims)``.
            size (tuple[int]): Height and width in tokens.
            table (Tensor, optional): What :func:`rotary_table` gives for this
                size, for callers that share it between layers.

        Returns:
            Tensor: ``(B, height * width, embed_dims)``.
        """
        queries, keys, values = self.project(x, size, table)
        if self.softmax:
            # Positions have raised half precision to float32.
            attended = F.scaled_dot_product_attention(
                queries.to(values.dtype), keys.to(values.dtype), values)
        else:
            attended = laplacian_attention(
                queries, keys, values, *self.pool(queries, keys, size),
                self.gain, **self.options)
        attended = attended.transpose(1, 2).flatten(2)
        image = values.transpose(1, 2).flatten(2).mT.unflatten(2, size)
        local = self.local(image).flatten(2).transpose(1, 2)
        return self.proj(attended + local)

    def project(self,
                x: Tensor,
                size: Tuple[int, int],
                table: Optional[Tensor] = None) -> Tuple[Tensor, ...]:
        """Compute what the attention takes; arguments as of forward.

        Returns:
            tuple[Tensor]: Queries, keys and values, each
            ``(B, num_heads, height * width, embed_dims / num_heads)``.
        """
        queries, keys, values = self.qkv(x).unflatten(
            -1, (3, self.num_heads, self.head_dims)).unbind(2)
        if self.rope:
            if table is None:
                table = rotary_table(size, self.head_dims, x)
            queries = rotary_embedding(queries, table)
            keys = rotary_embedding(keys, table)
        return tuple(
            tokens.transpose(1, 2) for tokens in (queries, keys, values))

    def pool(self, queries: Tensor, keys: Tensor,
             size: Tuple[int, int]) -> Tuple[Optional[Tensor], ...]:
        """Average landmarks of what :meth:`project` returns.

        Returns:
            tuple[Tensor | None]: Landmarks of the keys, None where the keys
            themselves are the landmarks; and landmarks of the queries, None
            unless ``landmark_source`` asks for them.
        """
        grid = self.landmark_size(size)
        if grid == size:
            return None, None
        landmarks = pool_landmarks(keys, size, grid)
        if self.landmark_source == 'keys':
            return landmarks, None
        return landmarks, pool_landmarks(queries, size, grid)

    def extra_repr(self) -> str:
        """Name the attention that this layer computes."""
        if self.softmax:
            return (f'num_heads={self.num_heads}, kernel=softmax, '
                    f'rope={self.rope}')
        if self.landmark_ratio is not None:
            landmarks = f'landmark_ratio={self.landmark_ratio}'
        else:
            landmarks = f'landmark_grid={self.landmark_grid}'
        options = ', '.join(
            f'{name}={value}' for name, value in self.options.items())
        return (f'num_heads={self.num_heads}, {landmarks}, '
                f'landmark_source={self.landmark_source}, {options}, '
                f'rope={self.rope}')
