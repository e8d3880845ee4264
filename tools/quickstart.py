"""Train, evaluate and try the three quickstart models on real digits.

Interrupted, it goes on where it stopped when it is run again.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parent.parent
DIGITS = Path('data/digits')
# Config, its metrics and the held-out images it is tried on.
MODELS = {
    'laplacianformer-nano_digits':
    (['accuracy/top1'], 'classification/val/*/*.png'),
    'mask-rcnn_laplacianformer-nano_fpn_digits':
    (['coco/bbox_mAP_50', 'coco/segm_mAP_50'], 'detection/val/*.jpg'),
    'retinanet_laplacianformer-nano_fpn_digits':
    (['coco/bbox_mAP_50'], 'detection/val/*.jpg'),
}
NUM_PICTURES = 6


def run(tool: str, *arguments: str) -> float:
    """Run a tool; return the seconds it took."""
    command = [sys.executable, str(ROOT / 'tools' / tool), *arguments]
    print('$', 'python', f'tools/{tool}', *arguments, flush=True)
    start = time.time()
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)
    return time.time() - start


def spread(images: List[Path], count: int) -> List[Path]:
    """Pick ``count`` images evenly from all."""
    return [images[i * len(images) // count] for i in range(count)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    summary = []
    run('prepare_digits.py', '--out', str(DIGITS))
    for name, (metrics, pattern) in MODELS.items():
        config = str(ROOT / 'configs' / 'quickstart' / f'{name}.py')
        work_dir = Path('work_dirs') / name
        seconds = run('train.py', config, '--work-dir', str(work_dir),
                      '--resume', 'auto')
        checkpoint = (work_dir / 'last_checkpoint').read_text()
        run('test.py', config, checkpoint, '--work-dir', str(work_dir))
        logs = sorted(work_dir.glob('*/*.json'))
        measured = json.loads(logs[-1].read_text())
        pictures = work_dir / 'pictures'
        images = spread(sorted(DIGITS.glob(pattern)), NUM_PICTURES)
        run('image_demo.py', config, checkpoint, *map(str, images),
            '--out-dir', str(pictures), '--score-thr', '0.5')
        results = ', '.join(
            f'{metric} {measured[metric]:.3f}' for metric in metrics)
        summary.append(f'{name}: {results} on held-out images, trained in '
                       f'{seconds:.0f} s, pictures in {pictures}')
    print(*summary, sep='\n')


if __name__ == '__main__':
    main()
