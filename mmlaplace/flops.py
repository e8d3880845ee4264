"""Parameters and multiply-accumulates (MACs) of classifiers and detectors.

One MAC is one multiply-add of a convolution, a linear layer or a matrix
product, or one term |x - y| of a distance. Norms, activations, pooling and
interpolation of a host are left out, as is customary.
"""
import re
from collections import Counter
from pathlib import Path
from typing import Dict, Tuple

import torch
from mmengine import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .models import LaplacianAttention

# What the ops do, beside 'layers' for all that is not theirs.
OPS = ('kernel', 'products', 'whitening', 'inverse')


def attention_macs(layer: LaplacianAttention,
                   size: Tuple[int, int]) -> Counter:
    """Count the ops of an attention layer by formula, for one image.

    ``ops/README.md`` has the formulas; N tokens, m landmarks, d channels per
    head.

    Args:
        layer (LaplacianAttention): The layer.
        size (tuple[int]): Height and width in tokens.

    Returns:
        Counter: MACs under the names of :data:`OPS`. 'kernel' holds the
        pooling of the landmarks too, 'products' all that remains of Nystroem
        attention without whitening and with the inverse given.
    """
    tokens = size[0] * size[1]
    dims = layer.head_dims
    solver, num_iters = layer.options['solver'], layer.options['num_iters']
    grid = layer.landmark_size(size)
    counts = Counter()
    if layer.softmax:
        counts['products'] = 2 * tokens**2 * dims
    elif grid == size:
        counts['kernel'] = tokens**2 * dims
        counts['products'] = tokens**2 * dims
        counts['whitening'] = tokens**2
    else:
        landmarks = grid[0] * grid[1]
        pooled = 1 if layer.landmark_source == 'keys' else 2
        cross = landmarks * tokens
        counts['kernel'] = dims * (
            pooled * tokens + 2 * cross + landmarks**2)
        # C_q (W v) and, where the inverse X is had, W = X C_k.
        counts['products'] = 2 * cross * dims
        # S, W^T S W and the weighted columns.
        counts['whitening'] = 2 * cross * landmarks + cross
        if solver == 'newton_schulz':
            counts['inverse'] = 2 * num_iters * landmarks**3
            counts['products'] += landmarks * cross
        elif solver == 'exact':
            # The factors of P and two triangular solves for each key.
            counts['inverse'] = landmarks**3 // 3 + landmarks * cross
        else:
            # A product with P, two dot products and three sums for each key.
            counts['inverse'] = num_iters * (landmarks + 5) * cross
    if layer.options['whitening'] == 'none' or layer.softmax:
        del counts['whitening']
    return Counter(
        {name: layer.num_heads * count
         for name, count in counts.items()})


def _skip_roi_extractors(roi_head: nn.Module) -> None:
    # Which level a region is cut from depends on its values, and the heads'
    # MACs do not; on the meta device there are no values.
    def skip(extractor):

        def forward(feats, rois, **kwargs) -> Tensor:
            return feats[0].new_empty(
                len(rois), extractor.out_channels,
                *extractor.roi_layers[0].output_size)

        return forward

    for module in roi_head.modules():
        if hasattr(module, 'roi_layers'):
            module.forward = skip(module)


def _run(model: nn.Module, images: Tensor) -> None:
    size = tuple(images.shape[-2:])
    sample = BaseDataElement(
        metainfo=dict(
            img_shape=size, ori_shape=size, batch_input_shape=size))
    if hasattr(model, 'roi_head'):
        features = model.extract_feat(images)
        model.rpn_head(features)
        regions = images.new_zeros(model.test_cfg.rpn.max_per_img, 4)
        _skip_roi_extractors(model.roi_head)
        model.roi_head.forward(features, [BaseDataElement(bboxes=regions)],
                               [sample])
    else:
        model(images, [sample], mode='tensor')


def default_shape(cfg: Config) -> Tuple[int, int]:
    """Return the height and width that results of a config are quoted at.

    800 x 1333 for detectors; for classifiers what the name says, such as
    ``…_in1k-384px.py``, or 224.
    """
    if cfg.default_scope == 'mmdet':
        return (800, 1333)
    name = Path(cfg.filename or '').stem
    side = re.search(r'-(\d+)px$', name)
    return (int(side[1]), ) * 2 if side else (224, 224)


def count(cfg: Config, shape: Tuple[int, int]) -> Dict[str, int]:
    """Count the parameters and MACs of the model in a config, for one image.

    Nothing is computed: the model runs on the meta device. A two-stage
    detector is counted with as many regions as it keeps for one image.

    Args:
        cfg (Config): Config of mmpretrain or mmdet.
        shape (tuple[int]): Height and width of the image.

    Returns:
        dict[str, int]: ``parameters``; MACs of the ``layers``, which is all
        but our ops, and of each of :data:`OPS`; ``total``, their sum; and
        ``without_inverse``.
    """
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        with torch.device('meta'):
            # What only training needs is left out.
            model = MODELS.build(dict(cfg.model, train_cfg=None)).eval()
            images = torch.empty(1, 3, *shape)
    counter = FlopCounterMode(display=False)
    ours = Counter()
    # What the counter itself sees of our ops, to be taken out again: the part
    # of an attention layer that is not of its linear layers or convolution.
    seen = Counter()

    def watch(module: nn.Module, sign: int) -> None:
        starts = []
        module.register_forward_pre_hook(
            lambda *_: starts.append(counter.get_total_flops()))
        module.register_forward_hook(lambda *_: seen.update(
            flops=sign * (counter.get_total_flops() - starts.pop())))

    for layer in model.modules():
        if isinstance(layer, LaplacianAttention):
            layer.register_forward_hook(lambda layer, args, _: ours.update(
                attention_macs(layer, args[1])))
            watch(layer, 1)
            for child in layer.children():
                watch(child, -1)
    with torch.no_grad(), counter:
        _run(model, images)

    # The counter counts multiplications and additions.
    layers = (counter.get_total_flops() - seen['flops']) // 2
    total = layers + sum(ours.values())
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=layers,
        **{name: ours[name]
           for name in OPS},
        total=total,
        without_inverse=total - ours['inverse'])
