"""Measure what iterations and damping cost in accuracy.

On validation images of a config, the layers that invert a landmark kernel
are compared, in float32, with float64 and an exact inverse.
"""
import argparse
from typing import Dict, Iterator, List, Sequence, Tuple

import torch
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner, load_checkpoint
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mmlaplace import cli
from mmlaplace.models import LaplacianAttention
from mmlaplace.ops import (
    laplacian_attention,
    laplacian_kernel,
    newton_schulz_inverse,
    newton_schulz_residual,
)

# What the columns show; each is the largest over layers, images and heads.
COLUMNS = dict(
    condition='of the damped landmark kernel P',
    residual='||I - P X||_F',
    inverse='error of X',
    output='error of the output',
    gradient='error of its gradient with respect to the keys',
    kernel='error of the Nystroem kernel, against that of all tokens')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_config_arguments(parser)
    parser.add_argument(
        '--checkpoint', help='weights; random ones where it is left out')
    parser.add_argument(
        '--num-images', type=int, default=4, help='images to measure on')
    parser.add_argument(
        '--constant',
        action='store_true',
        help='replace each image by its mean: all landmarks are then equal')
    parser.add_argument(
        '--eps', type=float, nargs='+', default=[1e-4, 1e-3, 1e-2])
    parser.add_argument(
        '--num-iters', type=int, nargs='+', default=[8, 10, 12, 15, 20])
    return parser.parse_args()


@torch.no_grad()
def collect(args: argparse.Namespace) -> List[Tuple]:
    """Run the model; return the layers that invert, and their inputs."""
    cfg = cli.load_config(args.config, args.cfg_options)
    cli.check_data(cfg, ['val_dataloader'])
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    if args.checkpoint:
        load_checkpoint(model, args.checkpoint, map_location='cpu')
    cfg.val_dataloader.update(
        batch_size=args.num_images, num_workers=0, persistent_workers=False)
    batch = next(iter(Runner.build_dataloader(cfg.val_dataloader, seed=0)))
    images = model.data_preprocessor(batch)['inputs']
    if args.constant:
        images = images.mean((-2, -1), keepdim=True).expand_as(images)
    calls = []
    for layer in model.modules():
        if isinstance(layer, LaplacianAttention):
            layer.register_forward_hook(
                lambda layer, inputs, _: calls.append((layer, inputs)))
    model.eval().extract_feat(images)
    return [(layer, inputs) for layer, inputs in calls
            if layer.landmark_size(inputs[1]) != inputs[1]]


def error(measured: Tensor, exact: Tensor) -> float:
    """Relative Frobenius norm of the error, the largest of all matrices."""
    norm = torch.linalg.matrix_norm
    return (norm(measured - exact) / norm(exact)).max().item()


def attend(layer: LaplacianAttention, tokens: Sequence[Tensor], size: tuple,
           **options) -> Tuple[Tensor, Tensor]:
    """Compute the output and the gradient with respect to the keys."""
    queries, keys, values = tokens
    keys = keys.detach().requires_grad_()
    # In one precision, so that signs of differences are the same.
    landmarks, _ = layer.pool(queries.float(), keys.float(), size)
    output = laplacian_attention(queries, keys, values, landmarks,
                                 **dict(layer.options, **options))
    weights = torch.sin(torch.arange(output.numel())).view_as(output)
    output.backward(weights.to(output.dtype))
    return output.detach(), keys.grad


def measure(layer: LaplacianAttention, inputs: Tuple, eps: float,
            iterations: List[int]) -> Iterator[Tuple[int, Dict[str, float]]]:
    """Compare each number of iterations with float64 and exact inverses."""
    size = inputs[1]
    with torch.no_grad():
        tokens = layer.project(*inputs)
    queries, keys, _ = exact_tokens = [x.double() for x in tokens]
    landmarks = layer.pool(tokens[0], tokens[1], size)[0].double()
    scale = layer.options['scale']
    matrix = laplacian_kernel(landmarks, landmarks, scale)
    damped = matrix + eps * torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    inverse = torch.linalg.inv(damped)
    output, gradient = attend(
        layer, exact_tokens, size, solver='exact', eps=eps)
    shared = dict(
        condition=torch.linalg.cond(damped).max().item(),
        kernel=error(
            laplacian_kernel(queries, landmarks, scale) @ inverse
            @ laplacian_kernel(landmarks, keys, scale),
            laplacian_kernel(queries, keys, scale)))
    for num_iters in iterations:
        computed = newton_schulz_inverse(
            matrix.float(), num_iters, eps, positive_definite=True)
        outputs = attend(layer, tokens, size, num_iters=num_iters, eps=eps)
        yield num_iters, dict(
            shared,
            residual=newton_schulz_residual(matrix, computed,
                                            eps).max().item(),
            inverse=error(computed, inverse),
            output=error(outputs[0], output),
            gradient=error(outputs[1], gradient))


def main() -> None:
    args = parse_args()
    calls = collect(args)
    table = Table('eps', 'iters', *COLUMNS, box=MARKDOWN)
    for eps in args.eps:
        worst = {
            num_iters: dict.fromkeys(COLUMNS, 0.0)
            for num_iters in args.num_iters
        }
        for layer, inputs in calls:
            for num_iters, row in measure(layer, inputs, eps, args.num_iters):
                for name, value in row.items():
                    worst[num_iters][name] = max(value, worst[num_iters][name])
        for num_iters, row in worst.items():
            table.add_row(f'{eps:g}', str(num_iters),
                          *(f'{row[name]:.1e}' for name in COLUMNS))
    print(f'{len(calls)} layers; errors are relative, in Frobenius norm')
    for name, meaning in COLUMNS.items():
        print(f'{name}: {meaning}')
    Console(width=100).print(table)


if __name__ == '__main__':
    main()
