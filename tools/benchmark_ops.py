"""Time the ops, and measure their peak memory, against their rivals.

Needs torch and mmlaplace.ops alone; the plot needs matplotlib as well.

Contestants take turns in one process. Apart from `sdpa`, which is softmax
attention, all compute in float32 (float64 for float64 input), whatever
--dtype is. Landmarks are inputs: pooling them is not measured.

Sizes are batch x heads x tokens x landmarks x channels and, of the inverse,
matrices x landmarks x landmarks. `compiled` is the reference under
torch.compile, for which --compile asks; `graph`, on CUDA, is the reference
replayed as a CUDA graph. The columns:

  x ours     time over that of the first contestant, what mmlaplace.ops does
  extra      peak memory beyond the inputs and the gradient of the output
  working    extra less the output and the gradients of the inputs
  of inputs  working over the size of the inputs
  residual   the largest ||I - (matrix + eps I) inverse||_F of the batch
  limit      on CUDA, for ours: share of the card's limit that is reached, by
             the counts of ops/README.md, at the highest clock

On a CPU, memory is that of the process, known to about 0.3 MiB.
"""
import argparse
import math
from functools import partial
from itertools import product
from typing import (
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch.nn import functional as F

from mmlaplace import benchmark, ops
from mmlaplace.benchmark import count_bytes
from mmlaplace.ops import reference
from mmlaplace.ops.arguments import compute_in_float32

SCALE, NUM_ITERS, EPS = 4.0, 12, 1e-3
# Of normally distributed points: their Laplacian kernel is then about 0.16.
SPREAD = 0.2

# Of the backbone's `tiny`; its own table would need mmengine.
STRIDES = (4, 8, 16, 32)
HEADS = (2, 4, 10, 16)
CHANNELS = 32
LANDMARKS = 49
# Batch, height and width of the images.
IMAGES = dict(stages=(8, 224, 224), detection=(1, 800, 1333))
TOKENS = (10_000, 40_000, 160_000, 640_000, 1_000_000)
QUICK_IMAGES = dict(stages=(2, 28, 28), detection=(1, 40, 67))
QUICK_TOKENS = (1024, 4096)
SIZES = (*IMAGES, 'scaling')

DIRECTIONS = ('forward', 'forward + backward')
# Softmax attention needs no N x N memory, but N x N time.
MAX_SDPA_TOKENS = dict(cpu=70_000, cuda=200_000)


# Multiply-adds of TF32 in a clock of a multiprocessor, by compute capability.
TF32_PER_CLOCK = {(8, 0): 512, (9, 0): 1024}


class Prepared:
    """A function that is prepared once for each size it is called with.

    Args:
        prepare (callable): Takes the function and its inputs, and returns
            what to call in its place.
        function (callable): It takes tensors or None.
    """

    def __init__(self, prepare: Callable, function: Callable):
        self.prepare = prepare
        self.function = function
        self.prepared = {}

    def __call__(self, *inputs: Optional[Tensor]) -> Tensor:
        key = tuple(x if x is None else (x.shape, x.dtype) for x in inputs)
        if key not in self.prepared:
            self.prepared[key] = self.prepare(self.function, inputs)
        return self.prepared[key](*inputs)


def compile_function(function: Callable,
                     inputs: Sequence[Optional[Tensor]]) -> Callable:
    return torch.compile(function, dynamic=False)


class Case(NamedTuple):
    """One op at one size.

    ``shape`` is (matrices, landmarks, landmarks) for the inverse, else
    (batch, heads, tokens, landmarks, channels).
    """
    op: str
    sizes: str
    shape: Tuple[int, ...]

    def shrink(self) -> 'Case':
        """Return the case with one matrix, or with few tokens."""
        if self.op == 'inverse':
            return self._replace(shape=(1, *self.shape[1:]))
        *leading, tokens, landmarks, channels = self.shape
        # One more than the landmarks, lest the keys be their own.
        tokens = min(tokens, landmarks + 1)
        return self._replace(shape=(*leading, tokens, landmarks, channels))


def cdist_kernel(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.exp(torch.cdist(queries, keys, p=1) / -SCALE)


def lu_inverse(matrix: Tensor) -> Tensor:
    return torch.linalg.inv(reference.add_to_diagonal(matrix, EPS))


def reference_attention(queries: Tensor, keys: Tensor, values: Tensor,
                        landmarks: Tensor) -> Tensor:
    return reference.laplacian_attention(
        queries,
        keys,
        values,
        landmarks,
        query_landmarks=None,
        gain=None,
        scale=SCALE,
        kernel_function=reference.laplacian_kernel,
        whitening='scaled',
        solver='newton_schulz',
        num_iters=NUM_ITERS,
        eps=EPS)


def softmax_attention(queries: Tensor, keys: Tensor, values: Tensor,
                      landmarks: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values)


# `mmlaplace` is first: the others are compared with it.
CONTESTANTS = dict(
    kernel=dict(
        mmlaplace=partial(ops.laplacian_kernel, scale=SCALE),
        reference=partial(
            compute_in_float32, reference.laplacian_kernel, scale=SCALE),
        cdist=partial(compute_in_float32, cdist_kernel),
        gaussian=partial(ops.gaussian_kernel, scale=SCALE)),
    inverse=dict(
        mmlaplace=partial(
            ops.newton_schulz_inverse,
            num_iters=NUM_ITERS,
            eps=EPS,
            positive_definite=True),
        reference=partial(
            compute_in_float32,
            reference.newton_schulz_inverse,
            num_iters=NUM_ITERS,
            eps=EPS,
            positive_definite=True),
        lu=partial(compute_in_float32, lu_inverse)),
    attention=dict(
        mmlaplace=partial(
            ops.laplacian_attention,
            scale=SCALE,
            num_iters=NUM_ITERS,
            eps=EPS),
        reference=partial(compute_in_float32, reference_attention),
        gaussian=partial(
            ops.laplacian_attention,
            scale=SCALE,
            kernel='gaussian',
            num_iters=NUM_ITERS,
            eps=EPS),
        sdpa=softmax_attention))
for _contestants in CONTESTANTS.values():
    _contestants['compiled'] = Prepared(compile_function,
                                        _contestants['reference'])
CONTESTANTS['inverse']['graph'] = Prepared(
    torch.cuda.make_graphed_callables, CONTESTANTS['inverse']['reference'])


def list_cases(op: str, sizes: str, quick: bool) -> List[Case]:
    """List the sizes at which an op is measured."""
    if sizes == 'all':
        return [
            case for group in SIZES for case in list_cases(op, group, quick)
        ]
    if sizes == 'scaling':
        if op == 'inverse':  # it does not see the tokens
            return []
        shapes = [(1, HEADS[0], tokens, LANDMARKS, CHANNELS)
                  for tokens in (QUICK_TOKENS if quick else TOKENS)]
        return [Case(op, sizes, shape) for shape in shapes]

    batch, height, width = (QUICK_IMAGES if quick else IMAGES)[sizes]
    stages = [(heads, math.ceil(height / stride) * math.ceil(width / stride))
              for heads, stride in zip(HEADS, STRIDES)]
    if op == 'inverse':
        # Few landmarks and many; a stage that has no more tokens than
        # landmarks inverts nothing.
        shapes = [(160, 49, 49), (16, 196, 196)] if sizes == 'stages' else []
        shapes += [(batch * heads, LANDMARKS, LANDMARKS)
                   for heads, tokens in stages if tokens > LANDMARKS]
    else:
        shapes = [(batch, heads, tokens, min(tokens, LANDMARKS), CHANNELS)
                  for heads, tokens in stages]
    return [Case(op, sizes, shape) for shape in shapes[:1 if quick else None]]


def make_inputs(case: Case, device: str,
                dtype: torch.dtype) -> Tuple[List[Tensor], Tensor]:
    """Make the inputs of an op, as leaves, and the gradient of its output.

    That gradient is random: the expanded ones of ``sum()`` would spare some
    contestants a read.
    """
    torch.manual_seed(benchmark.SEED)

    def points(*shape: int) -> Tensor:
        return SPREAD * torch.randn(*shape, device=device)

    if case.op == 'inverse':
        landmarks = points(*case.shape[:2], CHANNELS)
        inputs = [reference.laplacian_kernel(landmarks, landmarks, SCALE)]
        output_shape = case.shape
    else:
        *leading, tokens, landmarks, channels = case.shape
        if case.op == 'kernel':
            inputs = [
                points(*leading, tokens, channels),
                points(*leading, landmarks, channels)
            ]
            output_shape = (*leading, tokens, landmarks)
        else:
            inputs = [points(*leading, tokens, channels) for _ in range(3)]
            # Keys that are their own landmarks are given as None.
            inputs.append(
                points(*leading, landmarks, channels) if tokens > landmarks
                else None)
            output_shape = (*leading, tokens, channels)
    inputs = [
        x if x is None else x.to(dtype).requires_grad_() for x in inputs
    ]
    return inputs, torch.randn(output_shape, device=device).to(dtype)


def call(function: Callable, inputs: List[Tensor], grad_output: Tensor,
         backward: bool) -> Tuple[Tensor, ...]:
    """Return the output and, with ``backward``, the gradients."""
    if not backward:
        with torch.no_grad():
            return (function(*inputs), )
    output = function(*inputs)
    leaves = [x for x in inputs if x is not None]
    # Softmax attention does not use the landmarks.
    return (output,
            *torch.autograd.grad(
                output, leaves, grad_output, allow_unused=True))


def measure_memory(case: Case, name: str, backward: bool, device: str,
                   dtype: torch.dtype) -> Dict[str, int]:
    """Measure the peak memory of one call in this process."""
    function = CONTESTANTS[case.op][name]
    # Loads code and workspaces, which are no memory of the call.
    call(function, *make_inputs(case.shrink(), device, dtype), backward)
    inputs, grad_output = make_inputs(case, device, dtype)
    (output, *gradients), extra = benchmark.measure_extra(
        partial(call, function, inputs, grad_output, backward), device)
    kept = count_bytes([output, *gradients])
    return dict(
        input_bytes=count_bytes(inputs),
        output_bytes=count_bytes([output]),
        gradient_bytes=count_bytes(gradients),
        extra_bytes=extra,
        # Below 0 where the system's count is off.
        working_bytes=max(extra - kept, 0))


def measure_residual(function: Callable, matrix: Tensor) -> float:
    """Return the largest residual of the inverses in a batch."""
    with torch.no_grad():
        inverse = function(matrix)
        return ops.newton_schulz_residual(matrix.double(), inverse.double(),
                                          EPS).max().item()


def find_limit(case: Case, backward: bool, card: Any) -> Optional[float]:
    """Return the seconds that a card needs at least, in float32.

    Args:
        case (Case): The op and its size.
        backward (bool): Whether its gradient counts, too.
        card: Like what ``torch.cuda.get_device_properties`` returns.

    Returns:
        float | None: None where it is not known.
    """
    clocks = card.multi_processor_count * card.clock_rate * 1e3
    numbers_per_second = (
        2 * card.memory_clock_rate * 1e3 * card.memory_bus_width / 8 / 4)
    if case.op == 'inverse':
        products_per_clock = TF32_PER_CLOCK.get((card.major, card.minor))
        if products_per_clock is None:
            return None
        matrices, size, _ = case.shape
        # Of float32 numbers in three parts; backward computes anew.
        products = 3 * (7 if backward else 2) * NUM_ITERS * matrices * size**3
        numbers = (5 if backward else 2) * matrices * size**2
        return max(products / products_per_clock / clocks,
                   numbers / numbers_per_second)
    batch, heads, tokens, landmarks, channels = case.shape
    pairs = batch * heads * tokens * landmarks
    of_tokens = batch * heads * tokens * channels
    if case.op == 'kernel':
        instructions = (7 if backward else 2) * pairs * channels
        numbers = (3 * of_tokens + 3 * pairs if backward else
                   of_tokens + pairs)
    elif tokens > landmarks:
        # Two for each of four distance terms forward; backward of five, and
        # four for each of four sign terms.
        instructions = (34 if backward else 8) * pairs * channels
        numbers = (19 if backward else 7) * of_tokens
    else:
        return None
    return max(instructions / (128 * clocks), numbers / numbers_per_second)


def start_rows(case: Case, backward: bool, device: str,
               compiled: bool) -> List[dict]:
    """Return a row without figures for each contestant."""
    rows = [
        dict(
            case._asdict(), direction=DIRECTIONS[backward], contestant=name)
        for name in CONTESTANTS[case.op]
        if (name != 'compiled' or compiled) and (
            name != 'graph' or device == 'cuda')
    ]
    if device == 'cuda':
        rows[0]['limit'] = find_limit(case, backward,
                                      torch.cuda.get_device_properties())
    return rows


def measure(rows: List[dict], case: Case, backward: bool, device: str,
            dtype: torch.dtype, rounds: int) -> None:
    """Fill the rows of all contestants at one size.

    Each gets the figures of :func:`mmlaplace.benchmark.time_in_turns` and of
    :func:`measure_memory`, or a ``failure``.
    """
    # Memory first: who runs out of it, apart, is not let into this process.
    for row in rows:
        name = row['contestant']
        if name == 'sdpa' and case.shape[2] > MAX_SDPA_TOKENS[device]:
            row['failure'] = 'too large'
            continue
        measure_peak = measure_memory if device == 'cuda' else partial(
            benchmark.run_apart, ['mmlaplace.ops'], measure_memory)
        with benchmark.failure_noted_in(row):
            row.update(measure_peak(case, name, backward, device, dtype))

    inputs, grad_output = make_inputs(case, device, dtype)
    functions = [CONTESTANTS[case.op][row['contestant']] for row in rows]
    if case.op == 'inverse':
        for row, function in zip(rows, functions):
            if 'failure' in row:
                continue
            with benchmark.failure_noted_in(row):
                row['residual'] = measure_residual(function, *inputs)
    calls = [
        partial(call, function, inputs, grad_output, backward)
        for function in functions
    ]
    benchmark.time_in_turns(rows, calls, device, rounds)


def print_line(name: str, cells: List[str]) -> None:
    print(f'  {name:10}' + ''.join(f'{cell:>10}' for cell in cells))


def print_head(op: str) -> None:
    """Print the head of an op's table."""
    print(f'\n{op}')
    print_line('', [
        'median', 'min', 'max', 'x ours', 'extra', 'working',
        'residual' if op == 'inverse' else 'of inputs', 'limit'
    ])
    print_line('', ['ms', 'ms', 'ms', '', 'MiB', 'MiB'])


def print_rows(rows: List[dict]) -> None:
    """Print the rows of one size and direction."""
    print(f'{" x ".join(map(str, rows[0]["shape"]))}, {rows[0]["direction"]}')
    for row in rows:
        if 'median' not in row:
            failure = row.get('failure', 'interrupted')
            print(f'  {row["contestant"]:13}{failure}')
            continue
        times = row['median'], min(row['seconds']), max(row['seconds'])
        memory = row['extra_bytes'], row['working_bytes']
        cells = [f'{1e3 * x:.3f}' for x in times]
        cells.append(f'{row["median"] / rows[0]["median"]:.2f}'
                     if 'median' in rows[0] else '')
        cells += [f'{x / 2**20:.2f}' for x in memory]
        cells.append(f'{row["residual"]:.1e}' if row['op'] == 'inverse' else
                     f'{row["working_bytes"] / row["input_bytes"]:.2f}')
        if row.get('limit') is not None:
            cells.append(f'{row["limit"] / row["median"]:.0%}')
        print_line(row['contestant'], cells)


def scaling_curves(rows: List[dict],
                   direction: str) -> Dict[str, Dict[str, List[dict]]]:
    """Collect the scaling rows by op and contestant, in order of tokens."""
    curves = {}
    for row in rows:
        if (row['sizes'], row['direction']) == (
                'scaling', direction) and 'median' in row:
            of_op = curves.setdefault(row['op'], {})
            of_op.setdefault(row['contestant'], []).append(row)
    return curves


def print_growth(rows: List[dict]) -> None:
    """Print how time and memory grow from each number of tokens to the next.
    """
    for direction, (label, key) in product(
            DIRECTIONS, (('time', 'median'), ('memory', 'extra_bytes'))):
        for op, curves in scaling_curves(rows, direction).items():
            print(f'\n{op}, {direction}: growth of {label} per 4 x tokens')
            for name, curve in curves.items():
                if not all(row[key] for row in curve):
                    continue  # too little memory to be seen
                factors = []
                for last, row in zip(curve, curve[1:]):
                    tokens = row['shape'][2] / last['shape'][2]
                    factors.append((row[key] / last[key])**(
                        math.log(4) / math.log(tokens)))
                print_line(name, [f'{factor:.2f}' for factor in factors])


def plot(rows: List[dict], path: str) -> None:
    """Draw time and peak memory of forward + backward over the tokens."""
    from matplotlib.figure import Figure
    scaling = scaling_curves(rows, DIRECTIONS[1])
    figure = Figure(figsize=(11, 4.5 * len(scaling)), layout='constrained')
    axes = figure.subplots(len(scaling), 2, squeeze=False)
    for (op, curves), panels in zip(scaling.items(), axes):
        for panel, (label, key, unit) in zip(
                panels, (('time (ms)', 'median', 1e-3),
                         ('peak extra memory (MiB)', 'extra_bytes', 2**20))):
            benchmark.draw_curves(
                panel, {
                    name: ([row['shape'][2] for row in curve],
                           [row[key] / unit for row in curve])
                    for name, curve in curves.items()
                },
                title=f'{op}, {DIRECTIONS[1]}',
                xlabel='tokens',
                ylabel=label)
    figure.savefig(path, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmark.add_arguments(parser, plot='plot of the scaling sizes')
    parser.add_argument(
        '--dtype',
        choices=['float32', 'bfloat16', 'float16', 'float64'],
        default='float32',
        help='dtype of the inputs')
    parser.add_argument(
        '--ops',
        nargs='+',
        choices=list(CONTESTANTS),
        default=list(CONTESTANTS))
    parser.add_argument(
        '--sizes',
        choices=[*SIZES, 'all'],
        default='all',
        help='the stages of the tiny backbone for 8 images of 224 x 224 or, '
        'for detection, one of 800 x 1333; scaling goes up to a million '
        'tokens')
    parser.add_argument(
        '--compile',
        action='store_true',
        help='also measure the reference under torch.compile')
    parser.add_argument(
        '--quick',
        action='store_true',
        help='one round at one or two tiny sizes of each group, as a trial')
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    benchmark.check_arguments(parser, args)
    if args.out and (args.sizes not in ('scaling', 'all')
                     or args.ops == ['inverse']):
        parser.error('--out draws the scaling sizes of kernel and attention, '
                     'which --sizes or --ops leave out')
    return args


def main() -> None:
    args = parse_args()
    dtype = getattr(torch, args.dtype)
    environment = benchmark.describe_environment(
        args.device, dtype=str(dtype))
    benchmark.print_environment(environment)
    rows = []
    try:
        for op in args.ops:
            print_head(op)
            for case, backward in product(
                    list_cases(op, args.sizes, args.quick), (False, True)):
                measured = start_rows(case, backward, args.device,
                                      args.compile)
                rows += measured
                try:
                    measure(measured, case, backward, args.device, dtype,
                            args.rounds)
                finally:
                    print_rows(measured)
                    if args.json:
                        benchmark.save(args.json, environment, rows)
    except KeyboardInterrupt:
        print('interrupted')
    print_growth(rows)
    if args.out and scaling_curves(rows, DIRECTIONS[1]):
        plot(rows, args.out)


if __name__ == '__main__':
    main()
