"""Evaluate a classifier or detector of mmpretrain or mmdet."""
import argparse
from pathlib import Path

from mmengine import Config
from mmengine.config import ConfigDict

from mmlaplace import cli


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_config_arguments(parser)
    parser.add_argument('checkpoint', help='checkpoint file')
    cli.add_launcher_arguments(parser)
    parser.add_argument(
        '--out', metavar='FILE.pkl', help='save all predictions to this file')
    parser.add_argument(
        '--show-dir', help='save pictures with the predictions to this folder')
    parser.add_argument(
        '--tta',
        action='store_true',
        help='average over flipped images (test-time augmentation)')
    return parser.parse_args()


def dump_predictions(cfg: Config, path: str) -> None:
    """Have the evaluator also write all predictions to a pickle file."""
    if not path.endswith(('.pkl', '.pickle')):
        cli.fail(f'--out must end in .pkl or .pickle, got {path!r}')
    dumper = dict(
        mmdet='DumpDetResults', mmpretrain='DumpResults')[cfg.default_scope]
    evaluator = cfg.test_evaluator
    metrics = evaluator if isinstance(evaluator, list) else [evaluator]
    cfg.test_evaluator = [*metrics, dict(type=dumper, out_file_path=path)]


def save_pictures(cfg: Config, folder: str) -> None:
    """Have the visualization hook draw the predictions."""
    # Absolute, since the hooks would put it below the run's own folder.
    folder = str(Path(folder).resolve())
    if cfg.default_scope == 'mmdet':
        settings = dict(
            type='DetVisualizationHook', draw=True, test_out_dir=folder)
    else:
        settings = dict(
            type='VisualizationHook', enable=True, interval=1, out_dir=folder)
    cfg.default_hooks.visualization = settings


def enable_tta(cfg: Config) -> None:
    """Average predictions over the image and its mirror image.

    ``tta_model`` and ``tta_pipeline`` of the config win over these defaults.
    """
    if (cfg.model.get('roi_head') or {}).get('mask_head') is not None:
        cli.fail('--tta is for boxes alone in mmdet; leave the masks out with '
                 '--cfg-options model.roi_head.mask_head=None '
                 'test_evaluator.metric=bbox')
    if 'tta_model' not in cfg:
        cfg.tta_model = dict(
            mmdet=dict(
                type='DetTTAModel',
                tta_cfg=dict(
                    nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)),
            mmpretrain=dict(type='AverageClsScoreTTA'))[cfg.default_scope]
    if 'tta_pipeline' not in cfg:
        *load, pack = cfg.test_dataloader.dataset.pipeline
        if cfg.default_scope == 'mmdet':
            pack.meta_keys = ('img_id', 'img_path', 'ori_shape', 'img_shape',
                              'scale_factor', 'flip', 'flip_direction')
        flips = [dict(type='RandomFlip', prob=prob) for prob in (1.0, 0.0)]
        cfg.tta_pipeline = [
            *load,
            dict(type='TestTimeAug', transforms=[flips, [pack]])
        ]
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)


def main() -> None:
    args = parse_args()
    cfg = cli.load_config(args.config, args.cfg_options)
    cli.apply_launcher_arguments(cfg, args)
    if args.out is not None:
        dump_predictions(cfg, args.out)
    if args.show_dir is not None:
        save_pictures(cfg, args.show_dir)
    if args.tta:
        if args.show_dir is not None and cfg.default_scope == 'mmpretrain':
            cli.fail('mmpretrain draws no pictures with --tta; leave out '
                     '--show-dir')
        enable_tta(cfg)
    if '://' not in args.checkpoint and not Path(args.checkpoint).is_file():
        cli.fail(f'checkpoint {args.checkpoint!r} does not exist')
    cfg.load_from = args.checkpoint
    cli.check_data(cfg, ['test_dataloader'])
    runner = cli.build_runner(cfg)
    cli.check_checkpoint(runner.model, args.checkpoint)
    runner.test()


if __name__ == '__main__':
    main()
