"""The CUDA operators, compiled for the host with sanitizers and emulated.

A process of its own has them as its native operators, and runs ordinary tests
and those of tests/emulation in it.
"""
import subprocess
import sys
from pathlib import Path

import pytest

from mmlaplace.ops import build

EMULATION = Path(__file__).resolve().parents[1] / 'emulation'

# Sizes at which the emulation takes long are left to tests/emulation.
ORDINARY = {
    'laplacian_kernel':
        'not gaussian and not reference and not 2500 and (odd_sizes or layout '
        'or exponential or nonfinite or empty or equal_points or broadcast)',
    'newton_schulz':
        'not reference and not 257 and not 300 and (every_size and (2- or 15 '
        'or 16 or 17 or 33) or layout or nan_stays or comes_to_rest or '
        'symmetric_part or empty or beyond)',
    'laplacian_attention':
        'native and not exact and ('
        'test_empty or without_channels or any_memory_layout or '
        'nan_of_a_query or gain_broadcasts or gain_keeps_its_dtype or '
        'dtypes_unite or far_from_the_origin)',
    'native':
        'not attention and not attend and (opcheck or layout_is or '
        'refuse_what)',
}

pytestmark = [
    pytest.mark.needs_compiler,
    pytest.mark.skipif(
        sys.platform != 'linux', reason='the emulator needs Linux')
]


def run_emulated(*arguments):
    done = subprocess.run([
        sys.executable, EMULATION / 'run.py', '-m', 'pytest', '-q', '-p',
        'emulation_plugin', '-p', 'no:cacheprovider', '-o',
        'pythonpath=tests/test_ops',
        # What a sanitizer prints before it ends the process must not be lost.
        '--capture=sys', *arguments
    ],
                          cwd=EMULATION.parents[1],
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          text=True)
    assert done.returncode == 0, done.stdout


def test_emulator(tmp_path):
    program = tmp_path / 'test'
    subprocess.run([
        *build.find_compiler(), '-std=c++17', '-g1', '-fsanitize=undefined',
        '-fno-sanitize-recover=undefined', EMULATION / 'emulator.cpp',
        EMULATION / 'emulator_test.cpp', '-o', program
    ], check=True)
    subprocess.run([program], check=True)


@pytest.mark.parametrize(
    'name', ['laplacian_kernel', 'newton_schulz', 'laplacian_attention'])
def test_beside_the_ordinary_tests(name):
    run_emulated(f'tests/emulation/{name}.py')


@pytest.mark.parametrize('name', ORDINARY)
def test_ordinary_tests(name):
    run_emulated(f'tests/test_ops/test_{name}.py', '-k', ORDINARY[name])
