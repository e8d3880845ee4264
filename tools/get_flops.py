"""Count the parameters and multiply-accumulates (MACs) of a config's model."""
import argparse

from mmlaplace import cli
from mmlaplace.flops import count, default_shape

MEANING = dict(
    layers='convolutions, linear layers and other products',
    kernel='distances of the kernel, pooling of landmarks',
    products='Nystroem products',
    whitening='injective whitening',
    inverse='inverse of the landmark kernel',
    total='all of these',
    without_inverse='all but the inverse')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_config_arguments(parser)
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        help='height and width of the image; by default 800 1333 for '
        'detectors and, for classifiers, what the name says (-384px) or 224')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    cfg = cli.load_config(args.config, args.cfg_options)
    shape = tuple(args.shape or default_shape(cfg))
    if min(shape) < 1:
        cli.fail(f'--shape must be two numbers of 1 or more, got {shape}')
    try:
        counts = count(cfg, shape)
    except (KeyError, NotImplementedError, RuntimeError, TypeError,
            ValueError) as error:
        cli.fail(f'cannot count the model of {args.config!r} at {shape}: '
                 f'{str(error).strip().splitlines()[0]}')
    print(f'{args.config}, one image of {shape[0]} x {shape[1]}')
    print(f'{"parameters":15} {counts["parameters"] / 1e6:10.3f} M')
    for name, meaning in MEANING.items():
        print(f'{name:15} {counts[name] / 1e9:10.3f} G MACs  {meaning}')


if __name__ == '__main__':
    main()
