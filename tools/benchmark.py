"""Time models, backbones and attention layers, and measure their memory.

Each MODEL is one of

  CONFIG.py                  the model of a config of mmdet or mmpretrain;
                             --backbone-only takes its backbone
  mmdet::FOLDER/CONFIG.py    the same of a config that the host has brought;
                             also mmpretrain::
  laplacianformer:ARCH       our backbone, such as laplacianformer:tiny
  mmdet:TYPE                 a backbone by its type in the registry; also
                             mmpretrain:
  timm:NAME                  a model of timm without its classifier
  layer:laplacian            our attention layer, 64 channels and 2 heads, on
                             the map of the first stage, an image's size / 4;
                             also layer:gaussian, layer:softmax
  layer:performer            that of performer-pytorch
  layer:nystrom              that of nystrom-attention, with 49 landmarks

All but configs may be followed by options, as in Python:

  'mmdet:ResNet(depth=50)'   'laplacianformer:tiny(kernel="gaussian")'

Models take turns in one process, so that whatever slows the machine down
slows them all. Weights and inputs are random and nothing is downloaded;
detectors therefore find next to nothing, and what they do with boxes hardly
counts. bfloat16 is autocast, as in training by mmengine. A training step is
forward and backward of the mean square of the outputs, without optimizer.

The columns:

  params       parameters
  MACs         multiply-accumulates for one image: those of our attention by
               formula, others as torch counts them, which sees convolutions
               and matrix products alone; none where torch cannot count
  images/s     by the median of the rounds; then its milliseconds per image,
               the least and the most
  x first      time over that of the first model
  extra        peak memory beyond the weights and the inputs, for the whole
               batch; on a CPU that of a process of its own
"""
import argparse
import ast
import importlib
import math
import re
import sys
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

import torch
from mmengine import Config
from mmengine.hub import get_config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from mmlaplace import benchmark, cli
from mmlaplace.flops import count
from mmlaplace.models import LaplacianAttention, LaplacianFormer

KINDS = ('laplacianformer', *cli.HOSTS, 'timm', 'layer')
# By kind or layer, what it needs beyond mmlaplace: a module and its package.
NEEDS = dict(
    mmdet=('mmdet', 'mmdet'),
    mmpretrain=('mmpretrain', 'mmpretrain'),
    timm=('timm', 'timm'),
    performer=('performer_pytorch', 'performer-pytorch'),
    nystrom=('nystrom_attention', 'nystrom-attention'))

# The attention of the first stage of every published size.
EMBED_DIMS, HEADS, STRIDE, LANDMARKS = 64, 2, 4, 49
OUR_LAYERS = ('laplacian', 'gaussian', 'softmax')
LAYERS = (*OUR_LAYERS, 'performer', 'nystrom')

DIRECTIONS = ('forward', 'training step')
# A model that took longer for one call, in seconds, sits out larger images.
PATIENCE = 10

# What an unknown name, an option or a size may raise in a model; lack of
# memory is told apart before.
MODEL_ERRORS = (AssertionError, AttributeError, KeyError, RuntimeError,
                TypeError, ValueError)
# What a process that measures memory is forked from imports, where this one
# has done so.
PRELOAD = ('mmlaplace.cli', 'mmlaplace.flops', 'mmdet.models',
           'mmpretrain.models', 'timm')


class Model(NamedTuple):
    """What a MODEL on the command line asks for.

    ``role`` tells what it is called with: 'detector', 'classifier',
    'backbone' or 'layer'.
    """
    label: str
    kind: str
    name: str
    options: Dict[str, Any]
    role: str


def parse_model(text: str, backbone_only: bool) -> Model:
    """Read a MODEL, or end the program in a line that says what is wrong."""
    if text.endswith('.py'):
        scope = load_config(text).default_scope
        role = 'classifier' if scope == 'mmpretrain' else 'detector'
        return Model(
            Path(text).stem, 'config', text, {},
            'backbone' if backbone_only else role)
    match = re.fullmatch(rf'({"|".join(KINDS)}):([^:()]+)(\(.*\))?', text)
    if match is None:
        cli.fail('a model is CONFIG.py or KIND:NAME with KIND one of '
                 f'{", ".join(KINDS)}, got {text!r}')
    kind, name, options = match.groups()
    if kind == 'layer' and name not in LAYERS:
        cli.fail(f'a layer is one of {", ".join(LAYERS)}, got {text!r}')
    require(text, name if kind == 'layer' else kind)
    role = 'layer' if kind == 'layer' else 'backbone'
    return Model(text, kind, name, parse_options(text, options), role)


def parse_options(text: str, options: Optional[str]) -> Dict[str, Any]:
    """Read ``(name=value, ...)``."""
    try:
        call = ast.parse(f'f{options or "()"}', mode='eval').body
        if call.args:
            raise ValueError
        return {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    except (SyntaxError, ValueError):
        cli.fail(f'options must be (name=value, ...), got {text!r}')


def require(text: str, name: str) -> None:
    """Import what a kind or layer needs."""
    if name in NEEDS:
        module, package = NEEDS[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            cli.fail(f'{text!r} needs {package}: pip install {package} '
                     f'({first_line(error)})')


def load_config(name: str) -> Config:
    """Read a config from a file, or from an installed host."""
    host, installed, _ = name.partition('::')
    if not installed:
        return cli.load_config(name)
    if host not in cli.HOSTS:
        cli.fail(f'the host of a config must be one of {cli.HOSTS}, '
                 f'got {name!r}')
    # mmengine would install a host that is missing.
    require(name, host)
    try:
        return get_config(name)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        cli.fail(f'cannot read the config {name!r}: {first_line(error)}')


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def build(model: Model, shape: Tuple[int, int]) -> nn.Module:
    """Build a model with random weights."""
    torch.manual_seed(benchmark.SEED)
    if model.kind == 'layer':
        return build_layer(model.name, **model.options)
    if model.kind == 'timm':
        return build_timm(model.name, shape, **model.options)
    if model.kind == 'laplacianformer':
        module = LaplacianFormer(model.name, **model.options)
    else:
        scope, settings = model.kind, dict(type=model.name, **model.options)
        if model.kind == 'config':
            cfg = load_config(model.name)
            # It may ask for trained weights.
            cfg.model.backbone.pop('init_cfg', None)
            scope = cfg.default_scope
            # What only training needs is left out.
            settings = cfg.model.backbone if model.role == 'backbone' else (
                dict(cfg.model, train_cfg=None))
        with DefaultScope.overwrite_default_scope(scope):
            module = MODELS.build(settings)
    # mmengine would log how it drew each of them.
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel('ERROR')
    try:
        module.init_weights()
    finally:
        logger.setLevel(level)
    return module


def build_layer(name: str, **options) -> nn.Module:
    if name in OUR_LAYERS:
        return LaplacianAttention(EMBED_DIMS, HEADS, kernel=name, **options)
    settings = dict(dim=EMBED_DIMS, heads=HEADS, dim_head=EMBED_DIMS // HEADS)
    if name == 'performer':
        from performer_pytorch import SelfAttention
        return SelfAttention(**settings, **options)
    from nystrom_attention import NystromAttention
    settings['num_landmarks'] = LANDMARKS
    return NystromAttention(**dict(settings, **options))


def build_timm(name: str, shape: Tuple[int, int], **options) -> nn.Module:
    import timm
    card = timm.get_pretrained_cfg(name)
    if card is not None and card.fixed_input_size:
        # They are built for one size, and by default not for this one.
        options.setdefault('img_size', shape)
    return timm.create_model(name, num_classes=0, **options)


def make_inputs(model: Model, batch: int, shape: Tuple[int, int],
                device: str) -> tuple:
    """Make what a model is called with."""
    torch.manual_seed(benchmark.SEED)
    if model.role == 'layer':
        size = tuple(math.ceil(side / STRIDE) for side in shape)
        # Inside a network there are layers below, which want a gradient.
        tokens = torch.randn(
            batch,
            math.prod(size),
            EMBED_DIMS,
            device=device,
            requires_grad=True)
        return (tokens, size) if model.name in OUR_LAYERS else (tokens, )
    images = torch.randn(batch, 3, *shape, device=device)
    if model.role == 'classifier':
        return images, None, 'tensor'
    if model.role == 'detector':
        from mmdet.structures import DetDataSample
        sizes = dict.fromkeys(
            ('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'),
            shape)
        samples = [
            DetDataSample(metainfo=dict(sizes, scale_factor=(1.0, 1.0)))
            for _ in range(batch)
        ]
        return images, samples, 'predict'
    return (images, )


class _Counted(nn.Module):
    """Lends any module the interface of a host's model."""

    def __init__(self, module: nn.Module, inputs: tuple):
        super().__init__()
        self.module = module
        self.inputs = inputs

    def forward(self, images: Tensor, data_samples: list, mode: str):
        return self.module(*self.inputs)


def count_model(model: Model, shape: Tuple[int, int]) -> Dict[str, int]:
    """Count the parameters, and the MACs for one image.

    There are no ``macs`` where a model cannot run without values.
    """
    # Built with values, without which some models cannot be built.
    module = build(model, shape).to('meta')
    parameters = sum(x.numel() for x in module.parameters())
    if model.role in ('backbone', 'layer'):
        module = _Counted(module, make_inputs(model, 1, shape, 'meta'))
    # All that is read of a config.
    cfg = SimpleNamespace(
        default_scope='mmlaplace',
        model=dict(type=lambda train_cfg: module))
    try:
        return dict(parameters=parameters, macs=count(cfg, shape)['total'])
    except RuntimeError:
        return dict(parameters=parameters)


def prepare(model: Model, training: bool, shape: Tuple[int, int],
            args: argparse.Namespace) -> Callable[[], None]:
    """Build a model and its inputs; return what is to be measured."""
    module = build(model, shape).to(args.device)
    module.train(training)
    inputs = make_inputs(model, args.batch, shape, args.device)
    if args.channels_last:
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(
            x.to(memory_format=torch.channels_last)
            if isinstance(x, Tensor) and x.dim() == 4 else x for x in inputs)
    run = torch.compile(module, dynamic=False) if args.compile else module
    autocast = partial(
        torch.autocast,
        args.device,
        torch.bfloat16,
        enabled=args.dtype == 'bfloat16')

    def forward() -> None:
        with torch.no_grad(), autocast():
            run(*inputs)

    def step() -> None:
        with autocast():
            outputs = run(*inputs)
        if isinstance(outputs, Tensor):
            outputs = [outputs]
        sum(x.float().square().mean() for x in outputs).backward()
        module.zero_grad()
        inputs[0].grad = None

    return step if training else forward


def measure_memory(call: Callable[[], None], device: str) -> int:
    # Loads code and workspaces, which are no memory of the call.
    call()
    return benchmark.measure_extra(call, device)[1]


def measure_memory_apart(model: Model, training: bool,
                         shape: Tuple[int, int],
                         args: argparse.Namespace) -> int:
    return measure_memory(
        prepare(model, training, shape, args), args.device)


def measure(rows: List[dict], models: List[Model], training: bool,
            shape: Tuple[int, int], args: argparse.Namespace) -> None:
    """Fill the rows of all models at one size.

    Each gets ``extra_bytes`` and the figures of
    :func:`mmlaplace.benchmark.time_in_turns`, or a ``failure``.
    """
    # Models of other sizes are not to use up torch's limit of graphs.
    torch.compiler.reset()
    preload = [module for module in PRELOAD if module in sys.modules]
    calls = []
    for row, model in zip(rows, models):
        call = None
        if 'failure' not in row:
            with error_noted_in(row), benchmark.failure_noted_in(row):
                if args.device == 'cpu':
                    # Who runs out of memory there is not let in here.
                    row['extra_bytes'] = benchmark.run_apart(
                        preload, measure_memory_apart, model, training, shape,
                        args)
                call = prepare(model, training, shape, args)
                if args.device == 'cuda':
                    row['extra_bytes'] = measure_memory(call, args.device)
        # One that failed is not to hold memory while others are measured.
        calls.append(None if 'failure' in row else call)
    benchmark.time_in_turns(rows, calls, args.device, args.rounds)


@contextmanager
def error_noted_in(row: dict) -> Iterator[None]:
    """Turn an error of a model, such as of a size, into a row's failure."""
    try:
        yield
    except MODEL_ERRORS as error:
        row['failure'] = first_line(error)


def start_rows(models: List[Model], counts: List[Dict[str, int]],
               training: bool, shape: Tuple[int, int], batch: int,
               before: List[dict]) -> List[dict]:
    """Return a row without times for each model."""
    rows = []
    for model, counted in zip(models, counts):
        row = dict(
            model=model.label,
            direction=DIRECTIONS[training],
            shape=shape,
            batch=batch,
            **counted)
        if any((x['model'], x['direction']) == (row['model'],
                                                row['direction'])
               and x.get('median', 0) > PATIENCE for x in before):
            row['failure'] = 'too slow'
        rows.append(row)
    return rows


def print_line(width: int, name: str, cells: List[str]) -> None:
    print(f'  {name:{width}}' + ''.join(f'{cell:>10}' for cell in cells))


def name_width(rows: List[dict]) -> int:
    return max(len(row['model']) for row in rows)


def print_rows(rows: List[dict]) -> None:
    """Print the table of one size and direction."""
    first, width = rows[0], name_width(rows)
    height, breadth = first['shape']
    print(f'\n{first["direction"]}, {height} x {breadth}, '
          f'batch {first["batch"]}')
    print_line(width, '', [
        'params', 'MACs', 'images/s', 'ms/image', 'min', 'max', 'x first',
        'extra'
    ])
    print_line(width, '', ['M', 'G', '', '', '', '', '', 'MiB'])
    for row in rows:
        cells = [f'{row["parameters"] / 1e6:.2f}',
                 f'{row["macs"] / 1e9:.2f}' if 'macs' in row else '']
        if 'median' not in row:
            print_line(width, row['model'],
                       [*cells, '  ' + row.get('failure', 'interrupted')])
            continue
        times = row['median'], min(row['seconds']), max(row['seconds'])
        cells.append(f'{row["batch"] / row["median"]:.1f}')
        cells += [f'{1e3 * x / row["batch"]:.2f}' for x in times]
        cells.append(f'{row["median"] / first["median"]:.2f}'
                     if 'median' in first else '')
        cells.append(f'{row["extra_bytes"] / 2**20:.1f}')
        print_line(width, row['model'], cells)


def collect_curves(rows: List[dict], direction: str,
                   key: str) -> Dict[str, Tuple[list, list]]:
    """Collect pixels of an image and a figure by model."""
    curves = {}
    for row in rows:
        if row['direction'] == direction and 'median' in row:
            pixels, figures = curves.setdefault(row['model'], ([], []))
            pixels.append(math.prod(row['shape']))
            figures.append(row[key])
    return curves


def print_growth(rows: List[dict]) -> None:
    """Print time and memory per pixel over those at the smallest size."""
    for direction, (label, key) in product(
            DIRECTIONS, (('time', 'median'), ('memory', 'extra_bytes'))):
        curves = collect_curves(rows, direction, key)
        if curves:
            print(f'\n{direction}, {label} per pixel over that at the '
                  'smallest size')
        for name, (pixels, figures) in curves.items():
            per_pixel = [x / y for x, y in zip(figures, pixels)]
            if per_pixel[0]:  # else too little memory to be seen
                print_line(name_width(rows), name,
                           [f'{x / per_pixel[0]:.2f}' for x in per_pixel])


def plot(rows: List[dict], path: str) -> None:
    """Draw time and memory, over the pixels if there are several sizes."""
    from matplotlib.figure import Figure
    rows = [row for row in rows if 'median' in row]
    directions = [
        x for x in DIRECTIONS if any(row['direction'] == x for row in rows)
    ]
    series = len({row['shape'] for row in rows}) > 1
    figure = Figure(figsize=(11, 4.5 * len(directions)), layout='constrained')
    axes = figure.subplots(len(directions), 2, squeeze=False)
    for direction, panels in zip(directions, axes):
        for panel, (label, key, unit) in zip(
                panels, (('ms per image', 'median', 1e-3 * rows[0]['batch']),
                         ('peak extra memory (MiB)', 'extra_bytes', 2**20))):
            curves = {
                name: (pixels, [x / unit for x in figures])
                for name, (pixels, figures) in collect_curves(
                    rows, direction, key).items()
            }
            if series:
                benchmark.draw_curves(
                    panel,
                    curves,
                    title=direction,
                    xlabel='pixels',
                    ylabel=label)
            else:
                panel.barh(
                    list(curves),
                    [figures[0] for _, figures in curves.values()])
                panel.invert_yaxis()
                panel.set(title=direction, xlabel=label)
    figure.savefig(path, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'models', nargs='+', metavar='MODEL', help='what to measure')
    benchmark.add_arguments(
        parser, plot='plot of time and memory, over the pixels for --shapes')
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        '--shape',
        type=int,
        nargs=2,
        default=(224, 224),
        metavar=('H', 'W'),
        help='height and width of the images, 224 224 by default')
    shapes.add_argument(
        '--shapes',
        type=int,
        nargs='+',
        metavar='S',
        help='a series of square images, to see how time and memory grow')
    parser.add_argument('--batch', type=int, default=1, help='images at once')
    parser.add_argument(
        '--dtype', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument(
        '--train',
        action='store_true',
        help='the training step as well; not of whole detectors')
    parser.add_argument(
        '--backbone-only',
        action='store_true',
        help='of a config, the backbone alone')
    parser.add_argument(
        '--compile', action='store_true', help='apply torch.compile')
    parser.add_argument(
        '--channels-last',
        action='store_true',
        help='images and weights of convolutions in that order')
    args = parser.parse_args()
    benchmark.check_arguments(parser, args)
    args.shapes = [(side, side) for side in sorted(set(args.shapes))
                   ] if args.shapes else [tuple(args.shape)]
    if min(map(min, args.shapes)) < 1:
        parser.error('--shape and --shapes must be 1 or more')
    if args.batch < 1:
        parser.error(f'--batch must be 1 or more, got {args.batch}')
    return args


def parse_models(args: argparse.Namespace) -> List[Model]:
    """Read every MODEL."""
    models = [parse_model(text, args.backbone_only) for text in args.models]
    for i, model in enumerate(models):
        if any(model.label == other.label for other in models[:i]):
            cli.fail(f'{model.label!r} is asked for twice')
        if args.train and model.role == 'detector':
            cli.fail('--train takes no whole detectors, such as '
                     f'{model.label!r}; --backbone-only takes their backbone')
    return models


def count_models(models: List[Model],
                 shape: Tuple[int, int]) -> List[Dict[str, int]]:
    """Count all models, or end where one cannot be had at that size."""
    counts = []
    for model in models:
        try:
            counts.append(count_model(model, shape))
        except MODEL_ERRORS as error:
            cli.fail(f'cannot build or run {model.label!r} at {shape}: '
                     f'{first_line(error)}')
    return counts


def main() -> None:
    args = parse_args()
    models = parse_models(args)
    counts = [count_models(models, shape) for shape in args.shapes]
    environment = benchmark.describe_environment(
        args.device,
        dtype=args.dtype,
        compile=args.compile,
        channels_last=args.channels_last)
    benchmark.print_environment(environment)
    rows = []
    try:
        for shape, counted in zip(args.shapes, counts):
            for training in (False, True) if args.train else (False, ):
                measured = start_rows(models, counted, training, shape,
                                      args.batch, rows)
                rows += measured
                try:
                    measure(measured, models, training, shape, args)
                finally:
                    print_rows(measured)
                    if args.json:
                        benchmark.save(args.json, environment, rows)
    except KeyboardInterrupt:
        print('interrupted')
    if len(args.shapes) > 1:
        print_growth(rows)
    if args.out and any('median' in row for row in rows):
        plot(rows, args.out)


if __name__ == '__main__':
    main()
