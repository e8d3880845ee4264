"""What the emulated inverse has to pass beside the ordinary tests.

`test_cuda_emulation.py` runs this in a process that emulates CUDA.
"""
import pytest
import torch
from test_newton_schulz import (
    assert_as_good_as_reference,
    invert,
    positive_definite,
)

from mmlaplace.ops import newton_schulz_inverse

EACH_START = pytest.mark.parametrize('short_start', [False, True])


def example(size, batch=(2, )):
    return positive_definite(size, batch, condition=10.0) + 0.1 * torch.randn(
        *batch, size, size, dtype=torch.float64)


@EACH_START
@pytest.mark.parametrize('size, dtype', [(65, torch.float32),
                                         (128, torch.float32),
                                         (65, torch.float64),
                                         (88, torch.float64)], ids=str)
def test_larger_matrices(size, dtype, short_start):
    """Beyond 64 rows another kernel takes them."""
    assert_as_good_as_reference(
        example(size, (1, )).to(dtype), 2, 1e-3, short_start)


@EACH_START
@pytest.mark.parametrize('size, dtype', [(129, torch.float32),
                                         (89, torch.float64)], ids=str)
def test_matrices_beyond_shared_memory(size, dtype, short_start):
    assert_as_good_as_reference(
        example(size).to(dtype), 3, 1e-3, short_start)


@EACH_START
def test_small_card(monkeypatch, short_start):
    """Of the memory that a block takes, a byte is missing."""
    monkeypatch.setenv('MMLAPLACE_EMULATED_SHARED_MEMORY', '46095')
    assert_as_good_as_reference(example(49).float(), 3, 1e-3, short_start)


@EACH_START
@pytest.mark.parametrize('num_iters', [0, 3])
def test_more_work_than_blocks(short_start, num_iters):
    """The emulated grid has 50 blocks, or 12 backward."""
    assert_as_good_as_reference(
        example(3, (61, 2)).float(), num_iters, 1e-3, short_start)


@EACH_START
def test_offsets_beyond_32_bits(far_apart, short_start):
    options = 3, 1e-3, short_start
    matrix, weight = (example(3, (2, 2)).float() for _ in range(2))
    torch.testing.assert_close(
        invert(newton_schulz_inverse, far_apart(matrix), far_apart(weight),
               *options),
        invert(newton_schulz_inverse, matrix, weight, *options),
        rtol=0,
        atol=0)


def test_more_dimensions():
    assert_as_good_as_reference(example(5, (2, 3, 1, 2)), 3, 1e-3, False)


@EACH_START
@pytest.mark.parametrize('size, num_iters, dtype, batch', [
    (5, 4, torch.float32, 25),
    (33, 3, torch.float32, 1),
    (20, 3, torch.float64, 1),
    (66, 2, torch.float32, 1),
    (3, 0, torch.float64, 25),
], ids=str)
def test_threads_in_any_order(monkeypatch, size, num_iters, dtype, batch,
                              short_start):
    """A missing barrier lets some order of the threads change the result."""
    matrix, weight = (example(size, (batch, )).to(dtype) for _ in range(2))
    runs = []
    for order in ('forwards', 'backwards', 'random'):
        monkeypatch.setenv('MMLAPLACE_EMULATED_ORDER', order)
        runs.append(
            invert(newton_schulz_inverse, matrix, weight, num_iters, 1e-3,
                   short_start))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
