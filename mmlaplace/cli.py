"""What the tools share: configs and checkpoints, with errors in one line."""
import argparse
import pickle
import sys
from pathlib import Path
from typing import Iterator, NoReturn, Optional, Sequence, Tuple

import torch
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


def check_weights(cfg: Config) -> None:
    """Exit where the weights that a model starts from do not exist."""
    init_cfg = cfg.model.get('backbone', {}).get('init_cfg') or {}
    if isinstance(init_cfg, dict) and init_cfg.get('checkpoint'):
        _check_weights(init_cfg.checkpoint, 'model.backbone.init_cfg',
                       'model.backbone.init_cfg.checkpoint')
    if cfg.get('load_from'):
        _check_weights(cfg.load_from, 'load_from', 'load_from')


def _check_weights(path: str, switch: str, key: str) -> None:
    if '://' not in path and not Path(path).is_file():
        fail(f'{path!r}, from {key}, does not exist; train it first, name '
             f'another with --cfg-options {key}=…, or start from nothing with '
             f'{switch}=None')


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


def check_checkpoint(model: nn.Module, path: str) -> None:
    """Exit where a checkpoint cannot be read or is of another model.

    mmengine itself only warns, and goes on with random weights.

    Args:
        model (nn.Module): The model, as the runner wraps it or not.
        path (str): Checkpoint file or address.
    """
    try:
        checkpoint = CheckpointLoader.load_checkpoint(path, 'cpu')
    except (OSError, EOFError, RuntimeError, ValueError,
            pickle.UnpicklingError) as error:
        fail(f'cannot read checkpoint {path!r}: '
             f'{str(error).strip().splitlines()[0]}')
    state = checkpoint.get('state_dict', checkpoint)
    if is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    wrong = []
    for name, tensor in model.state_dict().items():
        if name not in state:
            wrong.append(f'{name} is missing')
        elif state[name].shape != tensor.shape:
            wrong.append(f'{name} has shape {tuple(state[name].shape)}, '
                         f'not {tuple(tensor.shape)}')
    if wrong:
        fail(f'checkpoint {path!r} is not of the model in the config: '
             f'{len(wrong)} tensors do not fit; {wrong[0]}')


def build_runner(cfg: Config) -> Runner:
    """Build the runner that the config asks for."""
    if 'runner_type' in cfg:
        return RUNNERS.build(cfg)
    return Runner.from_cfg(cfg)
