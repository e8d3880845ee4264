"""LaplacianFormer, a four-stage backbone with Laplacian linear attention."""
from typing import Optional, Sequence, Tuple, Union

import torch
import torch.utils.checkpoint
from mmcv.cnn import ConvModule, build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.transformer import FFN
from mmengine.model import BaseModule, ModuleList, Sequential
from mmengine.utils import is_seq_of
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..registry import MODELS
from .laplacian_attention import LaplacianAttention, rotary_table


def _conv_norm_relu(in_channels: int, out_channels: int, stride: int,
                    norm_cfg: dict) -> ConvModule:
    # Padding 1 makes the output size ceil(size / stride), odd sizes too.
    return ConvModule(
        in_channels,
        out_channels,
        3,
        stride=stride,
        padding=1,
        norm_cfg=norm_cfg)


class LaplacianFormerBlock(BaseModule):
    """Pre-norm block: x + attn(LN x), then x + mlp(LN x).

    Args:
        embed_dims (int): Channels.
        num_heads (int): Heads of the attention.
        mlp_ratio (float): Hidden channels of the MLP over ``embed_dims``.
        drop_path (float): Probability of dropping either branch for an image.
        norm_cfg (dict): Config of the two norms.
        attn_cfg (dict): Further arguments of :class:`LaplacianAttention`.
        init_cfg (dict, optional): Initialization config. Defaults to None.
    """

    def __init__(self,
                 embed_dims: int,
                 num_heads: int,
                 mlp_ratio: float,
                 drop_path: float,
                 norm_cfg: dict,
                 attn_cfg: dict,
                 init_cfg: Optional[dict] = None):
        super().__init__(init_cfg)
        self.norm1 = build_norm_layer(norm_cfg, embed_dims)[1]
        self.attn = LaplacianAttention(embed_dims, num_heads, **attn_cfg)
        self.drop_path = DropPath(drop_path)
        self.norm2 = build_norm_layer(norm_cfg, embed_dims)[1]
        self.mlp = FFN(
            embed_dims,
            int(embed_dims * mlp_ratio),
            act_cfg=dict(type='GELU'),
            add_identity=False)

    def forward(self, x: Tensor, size: Tuple[int, int],
                table: Optional[Tensor]) -> Tensor:
        """Map ``(B, height * width, embed_dims)`` tokens to the same shape.

        Args:
            x (Tensor): Tokens.
            size (tuple[int]): Height and width in tokens.
            table (Tensor, optional): What
                :func:`~.laplacian_attention.rotary_table` gives.
        """
        x = x + self.drop_path(self.attn(self.norm1(x), size, table))
        return x + self.drop_path(self.mlp(self.norm2(x)))


@MODELS.register_module()
class LaplacianFormer(BaseModule):
    """LaplacianFormer backbone.

    After `LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel
    <https://arxiv.org/abs/2604.20368>`_. Every stage uses the same attention,
    :class:`LaplacianAttention`. Where a feature map is no larger than the
    landmark grid, as in the last stage at 224 x 224, the keys are their own
    landmarks and the kernel matrix is exact.

    Args:
        arch (str | dict): 'tiny', 'small', 'medium', 'large' or 'huge', or a
            dict with the keys

            - **embed_dims** (list[int]): Channels of each stage.
            - **depths** (list[int]): Blocks of each stage.
            - **num_heads** (list[int]): Heads of each stage.

            Defaults to 'tiny'.
        in_channels (int): Channels of the input. Defaults to 3.
        out_indices (Sequence[int]): Stages to return, from 0. Stages after
            the last of them are not built. Defaults to ``(3, )``.
        frozen_stages (int): -1 freezes nothing, 0 the stem, n the stem and
            the first n stages with their output norms. Defaults to -1.
        norm_eval (bool): Whether batch norms use their stored statistics in
            training too. Defaults to False.
        with_cp (bool): Whether blocks are recomputed in the backward pass to
            save memory. Defaults to False.
        drop_path_rate (float): Stochastic depth rate of the last block; it
            rises linearly from 0 at the first. Defaults to 0.1.
        mlp_ratio (float): Hidden channels of the MLPs over their channels.
            Defaults to 4.0.
        stem_channels (int): Channels inside the stem. Defaults to 32.
        landmark_grid (Sequence[int]): Landmarks down and across, whatever
            the image size, so that time is linear in its pixels. Defaults to
            ``(7, 7)``, which at 224 x 224 is the published pooling by 8, 4,
            2 and 1.
        landmark_ratio (int | Sequence[int], optional): Takes the place of
            ``landmark_grid`` where given: tokens per landmark down and
            across, for each stage, or for the first stage and halved from
            stage to stage. The number of landmarks, and the cost of their
            inverse, then grow with the image. Defaults to None.
        landmark_source (str): 'keys', or 'queries_and_keys' as the paper's
            text reads, which is neither symmetric nor well conditioned.
            Defaults to 'keys'.
        scale (float): Length scale of the kernel. Defaults to 4.0.
        solver (str): 'newton_schulz', 'conjugate_gradient' or 'exact', see
            :func:`mmlaplace.ops.laplacian_attention`.
            Defaults to 'newton_schulz'.
        num_iters (int): Iterations of the solver. Defaults to 12.
        eps (float): Damping of landmark kernel and whitening.
            Defaults to 1e-3.
        whitening (str): 'scaled', 'literal' or 'none', see
            :func:`mmlaplace.ops.laplacian_attention`.
            Defaults to 'scaled'.
        kernel (str): 'laplacian', or 'gaussian' or 'softmax' for comparison.
            Defaults to 'laplacian'.
        rope (bool): Whether queries and keys carry 2-D rotary embedding;
            there is no learned position table. Defaults to True.
        conv_norm_cfg (dict): Norm of stem and downsampling.
            Defaults to ``dict(type='BN')``.
        norm_cfg (dict): Norm of the blocks.
            Defaults to ``dict(type='LN', eps=1e-6)``.
        out_norm_cfg (dict): Norm of the outputs. The default takes mean and
            variance over all of an image's map. A LayerNorm per token would
            hide from dense heads how strongly each place responds.
            Defaults to ``dict(type='GN', num_groups=1)``.
        init_cfg (dict | list[dict], optional): Initialization config. None
            draws linear layers from a truncated normal distribution.

    Raises:
        TypeError: If ``arch`` is neither a name nor a dict.
        ValueError: If an argument is out of range; the message names it, what
            came and what is allowed.
    """
    min_size = 32  # pixels, the stride of the last stage
    arch_zoo = {
        'tiny':
        dict(
            embed_dims=[64, 128, 320, 512],
            depths=[1, 2, 3, 2],
            num_heads=[2, 4, 10, 16]),
        'small':
        dict(
            embed_dims=[64, 128, 320, 512],
            depths=[1, 3, 7, 4],
            num_heads=[2, 4, 10, 16]),
        'medium':
        dict(
            embed_dims=[64, 128, 288, 512],
            depths=[1, 3, 25, 5],
            num_heads=[2, 4, 9, 16]),
        'large':
        dict(
            embed_dims=[64, 128, 320, 512],
            depths=[1, 3, 40, 5],
            num_heads=[2, 4, 10, 16]),
        'huge':
        dict(
            embed_dims=[64, 128, 352, 512],
            depths=[1, 5, 49, 5],
            num_heads=[2, 4, 11, 16]),
    }

    def __init__(self,
                 arch: Union[str, dict] = 'tiny',
                 in_channels: int = 3,
                 out_indices: Sequence[int] = (3, ),
                 frozen_stages: int = -1,
                 norm_eval: bool = False,
                 with_cp: bool = False,
                 drop_path_rate: float = 0.1,
                 mlp_ratio: float = 4.0,
                 stem_channels: int = 32,
                 landmark_grid: Sequence[int] = (7, 7),
                 landmark_ratio: Union[int, Sequence[int], None] = None,
                 landmark_source: str = 'keys',
                 scale: float = 4.0,
                 solver: str = 'newton_schulz',
                 num_iters: int = 12,
                 eps: float = 1e-3,
                 whitening: str = 'scaled',
                 kernel: str = 'laplacian',
                 rope: bool = True,
                 conv_norm_cfg: dict = dict(type='BN'),
                 norm_cfg: dict = dict(type='LN', eps=1e-6),
                 out_norm_cfg: dict = dict(type='GN', num_groups=1),
                 init_cfg: Union[dict, Sequence[dict], None] = None):
        if init_cfg is None:
            init_cfg = dict(type='TruncNormal', layer='Linear', std=0.02)
        super().__init__(init_cfg)
        embed_dims, depths, num_heads = self._parse_arch(arch)
        self.out_indices = _parse_out_indices(out_indices, len(depths))
        if frozen_stages not in range(-1, len(depths) + 1):
            raise ValueError(f'frozen_stages must be from -1 to {len(depths)}'
                             f', got {frozen_stages!r}')
        if not 0 <= drop_path_rate < 1:
            raise ValueError('drop_path_rate must be from 0 to below 1, '
                             f'got {drop_path_rate}')
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp
        ratios = _parse_landmark_ratio(landmark_ratio, len(depths))
        rates = iter(
            torch.linspace(0, drop_path_rate, sum(depths),
                           device='cpu').tolist())

        self.downsample_layers = ModuleList()
        self.stages = ModuleList()
        # Stages that nobody reads would leave parameters without gradient.
        for i in range(max(self.out_indices) + 1):
            if i == 0:
                downsample = Sequential(
                    _conv_norm_relu(in_channels, stem_channels, 2,
                                    conv_norm_cfg),
                    _conv_norm_relu(stem_channels, stem_channels, 1,
                                    conv_norm_cfg),
                    _conv_norm_relu(stem_channels, embed_dims[0], 2,
                                    conv_norm_cfg))
            else:
                downsample = _conv_norm_relu(embed_dims[i - 1], embed_dims[i],
                                             2, conv_norm_cfg)
            self.downsample_layers.append(downsample)
            self.stages.append(
                ModuleList(
                    LaplacianFormerBlock(
                        embed_dims[i],
                        num_heads[i],
                        mlp_ratio=mlp_ratio,
                        drop_path=next(rates),
                        norm_cfg=norm_cfg,
                        attn_cfg=dict(
                            landmark_grid=landmark_grid,
                            landmark_ratio=ratios[i],
                            landmark_source=landmark_source,
                            scale=scale,
                            solver=solver,
                            num_iters=num_iters,
                            eps=eps,
                            whitening=whitening,
                            kernel=kernel,
                            rope=rope)) for _ in range(depths[i])))
            if i in self.out_indices:
                self.add_module(
                    f'norm{i}',
                    build_norm_layer(out_norm_cfg, embed_dims[i])[1])
        self._freeze_stages()

    def _parse_arch(self, arch: Union[str, dict]) -> Tuple[list, list, list]:
        if isinstance(arch, str):
            if arch not in self.arch_zoo:
                raise ValueError(f'arch must be one of {list(self.arch_zoo)} '
                                 f'or a dict, got {arch!r}')
            arch = self.arch_zoo[arch]
        elif not isinstance(arch, dict):
            raise TypeError(f'arch must be a name or a dict, got {arch!r}')
        keys = ('embed_dims', 'depths', 'num_heads')
        if set(arch) != set(keys):
            raise ValueError(f'arch must have the keys {keys}, '
                             f'got {tuple(arch)}')
        lengths = {len(arch[key]) for key in keys}
        if len(lengths) > 1 or not 1 <= lengths.pop() <= 4:
            raise ValueError('embed_dims, depths and num_heads of arch must '
                             f'agree in length, from 1 to 4, got {arch}')
        if min(arch['depths']) < 1:
            raise ValueError('depths of arch must be 1 or more, '
                             f'got {arch["depths"]}')
        return tuple(arch[key] for key in keys)

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Compute the feature maps of ``out_indices``.

        Args:
            x (Tensor): Images ``(B, in_channels, H, W)``, H and W of 32 or
                more pixels, divisible by 32 or not.

        Returns:
            tuple[Tensor]: For each stage i of ``out_indices``, in ascending
            order, ``(B, embed_dims[i], ceil(H / s), ceil(W / s))`` with
            stride s = 4, 8, 16, 32.

        Raises:
            ValueError: If the images are smaller or not four-dimensional.
        """
        if x.dim() != 4 or min(x.shape[-2:]) < self.min_size:
            raise ValueError(
                'images must have shape (B, C, H, W) with H and W of at least '
                f'{self.min_size} pixels, got {tuple(x.shape)}')
        # Then an image and its tokens (B, H * W, C) are the same memory.
        x = x.contiguous(memory_format=torch.channels_last)
        outputs = []
        for i, (downsample, blocks) in enumerate(
                zip(self.downsample_layers, self.stages)):
            x = downsample(x)
            size = tuple(x.shape[-2:])
            x = x.flatten(2).transpose(1, 2)
            attn = blocks[0].attn
            table = rotary_table(size, attn.head_dims,
                                 x) if attn.rope else None
            for block in blocks:
                if self.with_cp and self.training:
                    x = torch.utils.checkpoint.checkpoint(
                        block, x, size, table, use_reentrant=False)
                else:
                    x = block(x, size, table)
            x = x.transpose(1, 2).unflatten(2, size)
            if i in self.out_indices:
                outputs.append(getattr(self, f'norm{i}')(x))
        return tuple(outputs)

    def train(self, mode: bool = True) -> 'LaplacianFormer':
        """Set the mode; frozen stages, and batch norms under ``norm_eval``,
        stay in evaluation."""
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def _freeze_stages(self) -> None:
        frozen = []
        if self.frozen_stages >= 0:
            frozen.append(self.downsample_layers[0])
        for i in range(min(self.frozen_stages, len(self.stages))):
            frozen += [self.downsample_layers[i], self.stages[i]]
            if i in self.out_indices:
                frozen.append(getattr(self, f'norm{i}'))
        for module in frozen:
            module.eval()
            module.requires_grad_(False)

    def get_layer_depth(self,
                        param_name: str,
                        prefix: str = '') -> Tuple[int, int]:
        """Tell the depth of a parameter, for layer-wise learning rate decay.

        The stem has depth 0 and the n-th block n, together with the
        downsampling before it; output norms and whatever does not belong to
        the backbone come last.

        Args:
            param_name (str): Name of the parameter in the model.
            prefix (str): Name of the backbone in the model, with a dot, such
                as 'backbone.'. Defaults to ''.

        Returns:
            tuple[int, int]: Depth of the parameter and number of depths.
        """
        depths = [len(blocks) for blocks in self.stages]
        num_layers = sum(depths) + 2
        if not param_name.startswith(prefix):
            return num_layers - 1, num_layers
        kind, *rest = param_name[len(prefix):].split('.')
        if kind == 'downsample_layers':
            stage = int(rest[0])
            return (sum(depths[:stage]) + 1 if stage else 0), num_layers
        if kind == 'stages':
            stage, block = int(rest[0]), int(rest[1])
            return sum(depths[:stage]) + block + 1, num_layers
        return num_layers - 1, num_layers


def _parse_out_indices(out_indices: Sequence[int],
                       num_stages: int) -> Tuple[int, ...]:
    indices = (out_indices, ) if isinstance(out_indices, int) else out_indices
    if not indices or not set(indices) <= set(range(num_stages)):
        raise ValueError('out_indices must hold one or more stages from 0 to '
                         f'{num_stages - 1}, got {out_indices!r}')
    return tuple(sorted(set(indices)))


def _parse_landmark_ratio(ratio: Union[int, Sequence[int], None],
                          num_stages: int) -> Sequence[Optional[int]]:
    if ratio is None:
        return [None] * num_stages
    ratios = ratio
    if isinstance(ratio, int):
        ratios = [max(ratio >> i, min(ratio, 1)) for i in range(num_stages)]
    if not is_seq_of(ratios, int) or len(ratios) != num_stages:
        raise ValueError('landmark_ratio must be one integer or '
                         f'{num_stages}, got {ratio}')
    return ratios
