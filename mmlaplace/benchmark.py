"""What the benchmarks share: time, peak memory, environment, options, plot.

Needs torch alone; the plot needs matplotlib as well.
"""
import argparse
import json
import multiprocessing
import os
import platform
import re
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch

from .ops import backend

SEED = 0
# Short calls are repeated up to this time, in seconds, to make one sample.
SAMPLE_TIME = 0.02
# A contestant that has taken this many seconds sits out further rounds.
TIME_LIMIT = 30

PLOT_FORMATS = ('.png', '.pdf', '.svg')


def count_bytes(tensors) -> int:
    """Return the size of some tensors, of which each may be None."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _reset_peak(device: str) -> None:
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')


def _read_peak(device: str) -> int:
    """Return the most bytes in use since :func:`_reset_peak`."""
    if device == 'cuda':
        return torch.cuda.max_memory_allocated()
    status = Path('/proc/self/status').read_text()
    return 1024 * int(re.search(r'VmHWM:\s+(\d+)', status)[1])


def measure_extra(function: Callable, device: str) -> Tuple[Any, int]:
    """Measure what a call adds to the peak memory of this process.

    Args:
        function (Callable): What to call, without arguments.
        device (str): 'cpu' or 'cuda'.

    Returns:
        tuple: What the function returned, and bytes.
    """
    _reset_peak(device)
    before = _read_peak(device)
    result = function()
    return result, _read_peak(device) - before


def run_apart(preload: Sequence[str], function: Callable, *arguments) -> Any:
    """Call a function in a process of its own.

    There, no memory that earlier calls freed, and the allocator kept, is
    taken for free. The process is forked from one that has imported the
    modules in ``preload`` and computed nothing.

    Args:
        preload (Sequence[str]): Modules; those that are missing are left out.
        function (Callable): A function of a module.
        *arguments: What it gets.

    Returns:
        What the function returned.

    Raises:
        BrokenProcessPool: If the process died.
    """
    # Has glibc give every larger block back as soon as it is freed.
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(list(preload))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def failure_noted_in(row: dict) -> Iterator[None]:
    """Turn a lack of memory into the failure of a row."""
    try:
        yield
    except BrokenProcessPool:
        # Most likely Linux killed it, as it does where memory ends.
        row['failure'] = 'process died'
    except (MemoryError, RuntimeError) as error:
        messages = ('out of memory', "can't allocate memory")
        if isinstance(error, RuntimeError) and not any(
                message in str(error) for message in messages):
            raise
        row['failure'] = 'out of memory'


def _time_call(function: Callable, repeats: int, device: str) -> float:
    if device == 'cuda':
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    if device == 'cuda':
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def time_in_turns(rows: List[dict], calls: Sequence[Callable], device: str,
                  rounds: int) -> None:
    """Time calls that take turns.

    Each row gets a sample of ``seconds`` for each round, the mean of a few
    calls in a row, and their ``median``, or a ``failure``.

    Args:
        rows (list[dict]): Where the figures go; one that holds a failure is
            left out.
        calls (Sequence[Callable]): What to call for each row.
        device (str): 'cpu' or 'cuda'.
        rounds (int): Samples of each time.
    """
    repeats = [0] * len(rows)
    for i, (row, call) in enumerate(zip(rows, calls)):
        if 'failure' in row:
            continue
        with failure_noted_in(row):
            call()
            seconds = _time_call(call, 1, device)
            repeats[i] = min(max(int(SAMPLE_TIME / seconds), 1), 100)
            row['seconds'] = []

    for _ in range(rounds):
        for row, call, count in zip(rows, calls, repeats):
            if 'failure' in row or sum(row['seconds']) * count > TIME_LIMIT:
                continue
            with failure_noted_in(row):
                row['seconds'].append(_time_call(call, count, device))
                row['median'] = statistics.median(row['seconds'])


def describe_environment(device: str, **settings) -> Dict[str, object]:
    """Collect what the figures depend on, ``settings`` among it."""
    if device == 'cuda':
        processor = torch.cuda.get_device_name()
    else:
        names = re.search(r'model name\s*: (.*)',
                          Path('/proc/cpuinfo').read_text())
        processor = names[1] if names else platform.machine()
    if not backend.use_native(device):
        used = 'reference'
        # Said once why, not again by each process that measures memory.
        os.environ['MMLAPLACE_BACKEND'] = used
    elif device == 'cpu':
        used = f'native, {torch.ops.mmlaplace.cpu_capability()}'
    else:
        used = 'native'
    return dict(
        processor=processor,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        **settings,
        backend=used,
        seed=SEED)


def print_environment(environment: Dict[str, object]) -> None:
    """Print the head of a report."""
    width = max(map(len, environment))
    for name, value in environment.items():
        print(f'{name:{width}} {value}')


def save(path: str, environment: Dict[str, object],
         rows: List[dict]) -> None:
    """Write everything measured so far as JSON."""
    document = dict(environment=environment, rows=rows)
    Path(path).write_text(json.dumps(document, indent=1), 'utf-8')


def draw_curves(panel, curves: Dict[str, Tuple[list, list]],
                **labels) -> None:
    """Draw curves over logarithmic axes, with a line of linear growth.

    Args:
        panel (matplotlib.axes.Axes): Where to draw.
        curves (dict[str, tuple[list, list]]): Places and figures by name. The
            line starts where the first of them does.
        **labels: ``title``, ``xlabel`` and ``ylabel``.
    """
    for name, (places, figures) in curves.items():
        panel.loglog(places, figures, marker='o', label=name)
    places, figures = next(iter(curves.values()))
    panel.loglog(
        places, [figures[0] * x / places[0] for x in places],
        color='grey',
        linestyle=':',
        label='linear')
    panel.set(**labels)
    panel.grid(which='both', alpha=0.3)
    panel.legend()


def _output_path(text: str) -> str:
    """Refuse, before anything is measured, what cannot be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent,
                                      os.W_OK):
        raise argparse.ArgumentTypeError(f'cannot write {text!r}')
    return text


def add_arguments(parser: argparse.ArgumentParser, plot: str) -> None:
    """Add the options that every benchmark takes.

    Args:
        parser (argparse.ArgumentParser): The parser.
        plot (str): What ``--out`` draws.
    """
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    parser.add_argument(
        '--rounds',
        type=int,
        default=9,
        help='samples of each time, of which the median counts')
    parser.add_argument(
        '--out', type=_output_path, metavar='FILE.png', help=plot)
    parser.add_argument(
        '--json', type=_output_path, metavar='FILE.json', help='every figure')


def check_arguments(parser: argparse.ArgumentParser,
                    args: argparse.Namespace) -> None:
    """End the program where an option of :func:`add_arguments` is wrong."""
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda needs a GPU, and torch finds none')
    if args.rounds < 1:
        parser.error(f'--rounds must be 1 or more, got {args.rounds}')
    if args.out and Path(args.out).suffix not in PLOT_FORMATS:
        parser.error(f'--out must end in {", ".join(PLOT_FORMATS)}, '
                     f'got {args.out!r}')
    if args.out and find_spec('matplotlib') is None:
        print('no plot: matplotlib is not installed')
        args.out = None
