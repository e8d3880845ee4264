"""The CUDA operators compile without a GPU, and keep within the registers."""
import os
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mmlaplace.ops import build

OPS = Path(__file__).resolve().parents[2] / 'ops'
SOURCES = sorted(OPS.glob('cuda/*.cu'))
CARDS = ['sm_80', 'sm_90']

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<card>\w+)'.*?"
    r'(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?'
    r'Used (?P<registers>\d+) registers', re.DOTALL)


def compile_for_cards(source, target):
    """Compiles for the cards, and returns what the assembler reports."""
    from torch.utils.cpp_extension import CUDA_HOME
    include = Path(torch.__file__).parent / 'include'
    done = subprocess.run([
        Path(CUDA_HOME, 'bin', 'nvcc'),
        # Newer headers of torch need the later one.
        '-std=c++20' if torch.__version__ >= '2.14' else '-std=c++17', '-O3',
        '--expt-relaxed-constexpr', '-gencode',
        f'arch=compute_80,code=[{",".join(CARDS)}]', '-Xptxas', '-v',
        '-fatbin', source, '-o', target, f'-I{OPS}', '-isystem', include,
        '-isystem', include / 'torch' / 'csrc' / 'api' / 'include', '-isystem',
        sysconfig.get_path('include')
    ],
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope='module')
def reports(tmp_path_factory):
    """What the assembler reports on each source, all compiled at once."""
    try:
        build.check_machine(OPS, 'cuda')
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp('cuda')
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            source.stem: pool.submit(compile_for_cards, source,
                                     folder / f'{source.stem}.fatbin')
            for source in SOURCES
        }


@pytest.mark.parametrize('name', [source.stem for source in SOURCES])
def test_compiles_without_spills(reports, name):
    """Registers that do not suffice would go through memory."""
    kernels = list(KERNEL.finditer(reports[name].result()))
    for kernel in kernels:
        print('{card} {registers:>3} registers, {stores} + {loads} bytes '
              'spilled: {name}'.format(**kernel.groupdict()))
    assert {kernel['card'] for kernel in kernels} == set(CARDS)
    assert not [
        kernel['name'] for kernel in kernels
        if kernel['stores'] != '0' or kernel['loads'] != '0'
    ]
