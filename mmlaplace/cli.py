"""What the tools share: configs and checkpoints, with errors in one line."""
import argparse
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List, NoReturn, Optional, Sequence, Tuple

import cv2
import torch
from mmcv import imread
from mmengine import Config, DictAction
from mmengine.config import ConfigDict
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import RUNNERS
from mmengine.runner import CheckpointLoader, Runner
from torch import nn

from .checkpoint import allow_mmengine_checkpoints

HOSTS = ('mmdet', 'mmpretrain')


def fail(message: str) -> NoReturn:
    """Print ``error: message`` and exit with status 2."""
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every tool with a config takes."""
    parser.add_argument('config', help='config file of mmdet or mmpretrain')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        default={},
        metavar='KEY=VALUE',
        help='override settings of the config, such as '
        'train_dataloader.batch_size=4; lists as key="[a,b]"')


def add_launcher_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of tools that may run in several processes."""
    parser.add_argument(
        '--work-dir',
        help='folder for logs and checkpoints, work_dirs/CONFIG by default')
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='job launcher')
    # torch.distributed.launch passes it; torchrun sets the variable itself.
    parser.add_argument(
        '--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)


def load_config(path: str, options: Optional[dict] = None) -> Config:
    """Read a config of mmdet or mmpretrain and apply overrides.

    From here on ``torch.load`` reads mmengine's checkpoints.

    Args:
        path (str): Config file.
        options (dict, optional): Overrides as of ``--cfg-options``.

    Returns:
        Config: The merged config.
    """
    if not Path(path).is_file():
        fail(f'config {path!r} does not exist')
    cfg = Config.fromfile(path)
    try:
        cfg.merge_from_dict(options or {})
    except (KeyError, TypeError, IndexError) as error:
        fail(f'--cfg-options do not fit the config {path!r}: {error}')
    if cfg.get('default_scope') not in HOSTS:
        fail(f'default_scope of {path!r} must be one of {HOSTS}, '
             f'got {cfg.get("default_scope")!r}')
    allow_mmengine_checkpoints()
    return cfg


def apply_launcher_arguments(cfg: Config, args: argparse.Namespace) -> None:
    """Carry ``--work-dir`` and ``--launcher`` over to the config."""
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs', Path(args.config).stem))
    if args.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine would presume a card in each process.
        torch.distributed.init_process_group('gloo')
        cfg.model_wrapper_cfg = dict(
            type='MMDistributedDataParallel',
            device_ids=None,
            broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False))


def check_data(cfg: Config, loaders: Sequence[str]) -> None:
    """Exit where a file or folder that a dataset names does not exist.

    Args:
        cfg (Config): The config.
        loaders (Sequence[str]): Dataloaders to look at, such as
            'train_dataloader'.
    """
    for loader in loaders:
        if cfg.get(loader) is None:
            continue
        for key, dataset in _walk_datasets(cfg[loader].dataset,
                                           f'{loader}.dataset'):
            for name, path in _dataset_paths(dataset):
                if '://' not in path and not Path(path).exists():
                    fail(f'{path!r}, from {key}.{name}, does not exist; set '
                         f'it with --cfg-options {key}.{name}=…')


def check_training_set(runner: Runner) -> None:
    """Exit where a training set has no image to train on."""
    try:
        runner.train_loop  # reads the annotations
    except ValueError as error:
        # mmengine joins what is left of the annotations, even if nothing is.
        if 'need at least one array' not in str(error):
            raise
        fail('train_dataloader.dataset has no image with a box of the classes '
             'in its metainfo')


def check_weights(model: nn.Module, cfg: Config) -> None:
    """Exit where the weights to start from do not exist or do not fit.

    Of weights that do not fit mmengine only warns, and starts from random
    ones.

    Args:
        model (nn.Module): The model, as the runner wraps it or not.
        cfg (Config): The config.
    """
    backbone = getattr(_unwrap(model), 'backbone', None)
    init_cfg = cfg.model.get('backbone', {}).get('init_cfg') or {}
    if isinstance(init_cfg, dict) and init_cfg.get('checkpoint'):
        _check_weights(backbone, init_cfg.checkpoint,
                       init_cfg.get('prefix') or '', 'model.backbone.init_cfg',
                       'model.backbone.init_cfg.checkpoint')
    if cfg.get('load_from') and not cfg.get('resume'):
        _check_weights(backbone, cfg.load_from, 'backbone', 'load_from',
                       'load_from')


def _check_weights(backbone: Optional[nn.Module], path: str, prefix: str,
                   switch: str, key: str) -> None:
    if '://' not in path and not Path(path).is_file():
        fail(f'{path!r}, from {key}, does not exist; train it first, name '
             f'another with --cfg-options {key}=…, or start from nothing with '
             f'{switch}=None')
    checkpoint = read_checkpoint(path)
    if backbone is None:
        return
    misfits = _misfits(backbone, checkpoint, prefix)
    # Some may: a detector has norms of outputs that a classifier lacks.
    if len(misfits) > len(backbone.state_dict()) / 2:
        fail(f'{path!r}, from {key}, is not of the backbone in the config: '
             f'{len(misfits)} tensors do not fit; {misfits[0]}')


def _walk_datasets(dataset: ConfigDict,
                   key: str) -> Iterator[Tuple[str, ConfigDict]]:
    yield key, dataset
    if 'dataset' in dataset:
        yield from _walk_datasets(dataset.dataset, f'{key}.dataset')
    for i, part in enumerate(dataset.get('datasets', [])):
        yield from _walk_datasets(part, f'{key}.datasets.{i}')


def _dataset_paths(dataset: ConfigDict) -> Iterator[Tuple[str, str]]:
    root = dataset.get('data_root') or ''
    if root:
        yield 'data_root', root
    prefix = dataset.get('data_prefix') or {}
    prefixes = prefix.items() if isinstance(prefix, dict) else [(None, prefix)]
    parts = [('ann_file', dataset.get('ann_file'))] + [
        (f'data_prefix.{name}' if name else 'data_prefix', path)
        for name, path in prefixes
    ]
    for name, path in parts:
        if path:
            yield name, path if '://' in path else str(Path(root, path))


@contextmanager
def _weights_only() -> Iterator[None]:
    """Have torch refuse objects that run code.

    Before torch 2.6, and for checkpoints from the web even later, mmengine
    lets them run.
    """
    name = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
    before = os.environ.get(name, '0')
    os.environ[name] = '1'
    try:
        yield
    finally:
        os.environ[name] = before


def read_checkpoint(path: str) -> dict:
    """Read a checkpoint; exit where it is damaged or could run code.

    Args:
        path (str): Checkpoint file or address.

    Returns:
        dict: The content.
    """
    try:
        with _weights_only():
            checkpoint = CheckpointLoader.load_checkpoint(path, 'cpu')
    except Exception as error:  # of any type, depending on the bytes
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Where torch refuses an object, this line names it.
        cause = next((line for line in lines if 'GLOBAL' in line), lines[0])
        fail(f'cannot read checkpoint {path!r}: {cause}')
    if not isinstance(checkpoint, dict) or not isinstance(
            checkpoint.get('state_dict', checkpoint), dict):
        fail(f'checkpoint {path!r} holds no dict of weights')
    return checkpoint


def check_checkpoint(model: nn.Module, path: str) -> dict:
    """Exit where a checkpoint cannot be read or is of another model.

    mmengine itself only warns, and goes on with random weights.

    Args:
        model (nn.Module): The model, as the runner wraps it or not.
        path (str): Checkpoint file or address.

    Returns:
        dict: The content.
    """
    checkpoint = read_checkpoint(path)
    misfits = _misfits(_unwrap(model), checkpoint)
    if misfits:
        fail(f'checkpoint {path!r} is not of the model in the config: '
             f'{len(misfits)} tensors do not fit; {misfits[0]}')
    return checkpoint


def check_resumed(model: nn.Module, path: str) -> None:
    """Exit where training cannot go on from a checkpoint.

    Args:
        model (nn.Module): The model, as the runner wraps it or not.
        path (str): Checkpoint file or address.
    """
    checkpoint = check_checkpoint(model, path)
    for key in ('meta', 'message_hub'):
        if not isinstance(checkpoint.get(key), dict):
            fail(f'checkpoint {path!r} has no {key} to resume from; start '
                 'from its weights with --cfg-options load_from=…')
    if 'config' in checkpoint['meta']:
        fail(f'checkpoint {path!r} has a config in its meta, which mmengine '
             'would run as Python')


def _misfits(module: nn.Module,
             checkpoint: dict,
             prefix: str = '') -> List[str]:
    state = checkpoint.get('state_dict', checkpoint)
    prefix = f'{prefix.rstrip(".")}.' if prefix else ''
    misfits = []
    for name, tensor in module.state_dict().items():
        name = prefix + name
        # mmengine ignores what DataParallel puts in front.
        found = state.get(name, state.get(f'module.{name}'))
        if not isinstance(found, torch.Tensor):
            misfits.append(f'{name} is missing')
        elif found.shape != tensor.shape:
            misfits.append(f'{name} has shape {tuple(found.shape)}, '
                           f'not {tuple(tensor.shape)}')
    return misfits


def _unwrap(model: nn.Module) -> nn.Module:
    if is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        return model.module
    return model


def check_images(paths: Sequence[str]) -> None:
    """Exit where an image does not exist or cannot be decoded."""
    for path in paths:
        if not Path(path).is_file():
            fail(f'{path!r} does not exist')
        try:
            image = imread(path)
        except cv2.error:  # raised on an empty file
            image = None
        if image is None:
            fail(f'{path!r} cannot be read as an image')


def build_runner(cfg: Config) -> Runner:
    """Build the runner that the config asks for."""
    if 'runner_type' in cfg:
        return RUNNERS.build(cfg)
    return Runner.from_cfg(cfg)
