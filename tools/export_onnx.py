"""Export a classifier, or the backbone and neck of a detector, to ONNX.

The input is what the data preprocessor hands to the model: normalised images
(B, 3, H, W) in float32. A classifier gives its scores before softmax, a
detector the levels of its neck. The file holds standard operators alone. It
is compared with the model on another random input, of another batch or size
where these may vary.
"""
import argparse
import copy
from pathlib import Path
from typing import Dict, Sequence, Tuple

import torch
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from torch import Tensor, nn

from mmlaplace import cli
from mmlaplace.flops import default_shape
from mmlaplace.models import LaplacianFormer

TOLERANCE = 1e-4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_config_arguments(parser)
    parser.add_argument(
        '--checkpoint', help='checkpoint file; random weights without one')
    parser.add_argument(
        '--out', help='file to write, CONFIG.onnx in this folder by default')
    parser.add_argument(
        '--backbone', action='store_true', help='export the backbone alone')
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        help='height and width of the images; by default 800 1333 for '
        'detectors and, for classifiers, what the name says (-384px) or 224')
    parser.add_argument(
        '--dynamic',
        nargs='+',
        choices=['batch', 'size'],
        default=[],
        help='what the file leaves open: the number of images, their height '
        'and width, or both')
    return parser.parse_args()


def smallest_size(backbone: LaplacianFormer) -> Tuple[int, int]:
    """Return the height and width from which every stage pools landmarks.

    In smaller images the keys of some stages are their own landmarks, which
    is another graph.
    """
    sides = (backbone.min_size, ) * 2
    for i, blocks in enumerate(backbone.stages):
        attn = blocks[0].attn
        if attn.softmax:
            continue
        if attn.landmark_ratio is not None:
            cli.fail('--dynamic size needs landmark_grid, got landmark_ratio '
                     f'{attn.landmark_ratio}: the number of landmarks would '
                     'vary, which torch.export does not take')
        sides = tuple(
            max(side, 4 * 2**i * cells + 1)
            for side, cells in zip(sides, attn.landmark_grid))
    return sides


class RowwiseNorm(nn.Module):
    """Group norm of one group, whose means are taken row by row.

    onnxruntime adds up a whole map, of millions of values, in one float32.
    """

    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.mean(x)
        x = x * torch.rsqrt(self.mean(x.square()) + self.norm.eps)
        return (x * self.norm.weight[:, None, None] +
                self.norm.bias[:, None, None])

    @staticmethod
    def mean(x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True).mean((1, 2), keepdim=True)


def with_rowwise_norms(model: nn.Module) -> nn.Module:
    """Return a copy of a model with such norms of the backbone's outputs."""
    model = copy.deepcopy(model)
    for name, norm in list(model.backbone.named_children()):
        if (isinstance(norm, nn.GroupNorm) and norm.num_groups == 1
                and norm.affine):
            setattr(model.backbone, name, RowwiseNorm(norm))
    return model.eval()


def find_part(model: nn.Module, backbone: bool) -> nn.Module:
    """Return the part of a model that is exported."""
    if backbone:
        return model.backbone
    if hasattr(model, 'bbox_head') or hasattr(model, 'rpn_head'):
        return nn.Sequential(model.backbone, model.neck).eval()
    return model


def dynamic_dims(dynamic: Sequence[str],
                 smallest: Tuple[int, int]) -> Dict[int, torch.export.Dim]:
    """Describe the dimensions of the images that the file leaves open."""
    dims = {}
    if 'batch' in dynamic:
        dims[0] = torch.export.Dim('batch')
    if 'size' in dynamic:
        dims[2] = torch.export.Dim('height', min=smallest[0])
        dims[3] = torch.export.Dim('width', min=smallest[1])
    return dims


def outputs_of(part: nn.Module, images: Tensor) -> Tuple[Tensor, ...]:
    with torch.no_grad():
        outputs = part(images)
    return (outputs, ) if isinstance(outputs, Tensor) else tuple(outputs)


def export(part: nn.Module, images: Tensor, dims: dict, path: Path) -> None:
    outputs = outputs_of(part, images)
    names = (['scores'] if len(outputs) == 1 and outputs[0].dim() == 2 else
             [f'level{i}' for i in range(len(outputs))])
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        part, (images, ),
        path,
        input_names=['images'],
        output_names=names,
        dynamic_shapes=(dims, ),
        dynamo=True,
        external_data=False,
        verbose=False)


def explain(error: BaseException) -> str:
    """Return the first line of what made the exporter fail."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0]


def compare(part: nn.Module, images: Tensor, path: Path) -> float:
    """Return the largest difference of the file from the model.

    Raises:
        AssertionError: If they are not equal to :data:`TOLERANCE`.
    """
    import onnxruntime
    session = onnxruntime.InferenceSession(
        path, providers=['CPUExecutionProvider'])
    expected = outputs_of(part, images)
    found = [
        torch.from_numpy(output)
        for output in session.run(None, {'images': images.numpy()})
    ]
    torch.testing.assert_close(
        found, list(expected), rtol=TOLERANCE, atol=TOLERANCE)
    return max((a - b).abs().max().item() for a, b in zip(found, expected))


def main() -> None:
    args = parse_args()
    if torch.__version__ < '2.8':
        cli.fail(f'torch 2.8 or newer is needed, got {torch.__version__}')
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        cli.fail(f"{error}; pip install 'mmlaplace[export]' brings it")
    cfg = cli.load_config(args.config, args.cfg_options)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model).eval()
    if not isinstance(model.backbone, LaplacianFormer):
        cli.fail('the backbone must be LaplacianFormer, '
                 f'got {type(model.backbone).__name__}')
    if args.checkpoint:
        cli.check_checkpoint(model, args.checkpoint)
        load_checkpoint(model, args.checkpoint, map_location='cpu')

    batch, (height, width) = 1, args.shape or default_shape(cfg)
    smallest = (smallest_size(model.backbone) if 'size' in args.dynamic else
                (model.backbone.min_size, ) * 2)
    if height < smallest[0] or width < smallest[1]:
        cli.fail(f'--shape must be {smallest[0]} x {smallest[1]} or more, '
                 f'got {height} x {width}')
    part = find_part(model, args.backbone)
    path = Path(args.out or f'{Path(args.config).stem}.onnx')
    if 'batch' in args.dynamic:
        batch = 2  # one would be taken for a constant
    try:
        export(find_part(with_rowwise_norms(model), args.backbone),
               torch.randn(batch, 3, height, width),
               dynamic_dims(args.dynamic, smallest), path)
    except torch.onnx.OnnxExporterError as error:
        cli.fail(f'cannot export {args.config!r}: {explain(error)}')

    if 'batch' in args.dynamic:
        batch = 3
    if 'size' in args.dynamic:
        height, width = height + 37, width + 18
    images = 2 * torch.randn(batch, 3, height, width) + 1
    try:
        difference = compare(part, images, path)
    except AssertionError as error:
        cli.fail(f'{path} differs from the model: {error}')
    size = ' x '.join(map(str, images.shape))
    print(f'{path}: equal to the model on a random input of {size}, '
          f'largest difference {difference:.1e}')


if __name__ == '__main__':
    main()
