"""Train a classifier or detector from a config of mmpretrain or mmdet."""
import argparse
from pathlib import Path

import torch
from mmengine import Config
from mmengine.config import ConfigDict
from mmengine.runner import find_latest_checkpoint

from mmlaplace import cli


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_config_arguments(parser)
    cli.add_launcher_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='PATH',
        help='go on from this checkpoint, or from the latest in the work '
        'directory where PATH is left out or auto')
    parser.add_argument(
        '--amp',
        action='store_true',
        help='train with automatic mixed precision, in bfloat16 on the CPU')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size over all processes')
    return parser.parse_args()


def enable_amp(cfg: Config) -> None:
    """Turn the optimizer wrapper into the mixed precision one."""
    wrapper = cfg.optim_wrapper.get('type', 'OptimWrapper')
    if wrapper not in ('OptimWrapper', 'AmpOptimWrapper'):
        cli.fail('--amp needs optim_wrapper.type to be OptimWrapper or '
                 f'AmpOptimWrapper, got {wrapper!r}')
    if torch.cuda.is_available():
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    else:
        set_cpu_wrapper(cfg.optim_wrapper, 'mmlaplace.CPUAmpOptimWrapper')


def set_cpu_wrapper(wrapper: ConfigDict, name: str) -> None:
    """Choose a wrapper that knows nothing of the settings for GPUs."""
    wrapper.type = name
    for key in ('loss_scale', 'dtype', 'use_fsdp'):
        wrapper.pop(key, None)


def disable_amp_on_cpu(cfg: Config) -> None:
    """Let configs with mixed precision train where there is no GPU."""
    wrapper = cfg.get('optim_wrapper') or {}
    if (wrapper.get('type') == 'AmpOptimWrapper'
            and not torch.cuda.is_available()):
        print('no GPU: training in float32; --amp asks for bfloat16')
        set_cpu_wrapper(wrapper, 'OptimWrapper')


def enable_auto_scale_lr(cfg: Config) -> None:
    """Scale the learning rate to the actual batch size."""
    if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
        cli.fail('--auto-scale-lr needs auto_scale_lr.base_batch_size in the '
                 'config, the batch size that its learning rate is for')
    cfg.auto_scale_lr.enable = True


def apply_resume(cfg: Config, resume: str) -> None:
    """Have the runner go on from a checkpoint."""
    source = '--resume'
    if resume == 'auto':
        resume = find_latest_checkpoint(cfg.work_dir)
        source = str(Path(cfg.work_dir, 'last_checkpoint'))
    if resume is not None and not Path(resume).is_file():
        cli.fail(f'checkpoint {resume!r} of {source} does not exist')
    # Without a checkpoint yet, auto starts from the beginning.
    cfg.resume = resume is not None
    cfg.load_from = resume or cfg.get('load_from')


def main() -> None:
    args = parse_args()
    cfg = cli.load_config(args.config, args.cfg_options)
    cli.apply_launcher_arguments(cfg, args)
    if args.amp:
        enable_amp(cfg)
    disable_amp_on_cpu(cfg)
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if args.resume is not None:
        apply_resume(cfg, args.resume)
    elif cfg.get('resume') and not cfg.get('load_from'):
        apply_resume(cfg, 'auto')
    cli.check_data(cfg, ['train_dataloader', 'val_dataloader'])
    runner = cli.build_runner(cfg)
    cli.check_weights(runner.model, cfg)
    if cfg.get('resume'):
        cli.check_resumed(runner.model, cfg.load_from)
    cli.check_training_set(runner)
    runner.train()


if __name__ == '__main__':
    main()
