"""Write the quickstart's classification and detection sets to disk."""
import argparse
from functools import partial
from pathlib import Path

from rich.progress import track

from mmlaplace.datasets import write_classification_set, write_detection_set


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('data/digits'),
        help='folder that gets classification/ and detection/')
    parser.add_argument(
        '--seed', type=int, default=0, help='seed of both sets')
    parser.add_argument(
        '--num-train',
        type=int,
        default=600,
        help='training canvases of the detection set')
    parser.add_argument(
        '--num-val',
        type=int,
        default=100,
        help='validation canvases of the detection set')
    parser.add_argument(
        '--overwrite',
        action='store_true',
        help='replace sets that were written with other arguments')
    args = parser.parse_args()

    common = dict(seed=args.seed, overwrite=args.overwrite)
    try:
        classification = write_classification_set(
            args.out / 'classification', **common)
        detection = write_detection_set(
            args.out / 'detection',
            num_train=args.num_train,
            num_val=args.num_val,
            progress=partial(track, description='Detection canvases'),
            **common)
    except (ValueError, FileExistsError, ImportError) as error:
        parser.error(str(error))

    for task, counts in dict(
            classification=classification, detection=detection).items():
        print(f'{args.out / task}:')
        for split, numbers in counts.items():
            numbers = ', '.join(f'{n} {what}' for what, n in numbers.items())
            print(f'  {split}: {numbers}')


if __name__ == '__main__':
    main()
