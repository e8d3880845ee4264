"""Run a trained classifier or detector on images and save them drawn on."""
import argparse
from typing import List

from mmengine import Config

from mmlaplace import cli


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_config_arguments(parser)
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('images', nargs='+', help='image files')
    parser.add_argument(
        '--out-dir', default='work_dirs/image_demo', help='folder of pictures')
    parser.add_argument(
        '--device', default='cpu', help='device to run on, such as cuda:0')
    parser.add_argument(
        '--score-thr',
        type=float,
        default=0.3,
        help='draw detections of at least this score')
    return parser.parse_args()


def detect(cfg: Config, args: argparse.Namespace) -> List[str]:
    """Draw boxes and masks; describe what was found in each image."""
    from mmdet.apis import DetInferencer
    inferencer = DetInferencer(
        cfg, weights=args.checkpoint, device=args.device, show_progress=False)
    cli.check_checkpoint(inferencer.model, args.checkpoint)
    predictions = inferencer(
        args.images, out_dir=args.out_dir,
        pred_score_thr=args.score_thr)['predictions']
    classes = inferencer.model.dataset_meta['classes']
    return [
        ', '.join(
            f'{classes[label]} ({score:.2f})' for label, score in zip(
                found['labels'], found['scores'])
            if score >= args.score_thr) or 'nothing' for found in predictions
    ]


def classify(cfg: Config, args: argparse.Namespace) -> List[str]:
    """Write the predicted class into each image and return it."""
    from mmpretrain import ImageClassificationInferencer
    inferencer = ImageClassificationInferencer(
        cfg, pretrained=args.checkpoint, device=args.device)
    cli.check_checkpoint(inferencer.model, args.checkpoint)
    predictions = inferencer(args.images, show_dir=args.out_dir)
    return [
        f'{found.get("pred_class", found["pred_label"])} '
        f'({found["pred_score"]:.2f})' for found in predictions
    ]


def main() -> None:
    args = parse_args()
    cfg = cli.load_config(args.config, args.cfg_options)
    cli.check_images(args.images)
    cli.read_checkpoint(args.checkpoint)
    run = detect if cfg.default_scope == 'mmdet' else classify
    for path, found in zip(args.images, run(cfg, args)):
        print(f'{path}: {found}')
    print(f'pictures are in {args.out_dir}')


if __name__ == '__main__':
    main()
