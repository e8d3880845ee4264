"""What the emulated kernel matrix has to pass beside the ordinary tests.

`test_cuda_emulation.py` runs this in a process that emulates CUDA.
"""
import pytest
import torch
from test_laplacian_kernel import DTYPES, assert_equals_reference, points

from mmlaplace.ops import laplacian_kernel

# Queries, keys and channels. Forward, a tile has up to 256 queries, 64 keys
# and 64 channels; backward 512 points of the longer side, 64 of the shorter
# (32 in float64) and 32 channels.
SIZES = [(63, 64, 32), (64, 65, 33), (129, 66, 64), (66, 130, 65),
         (257, 3, 131), (31, 33, 1), (33, 31, 12), (513, 2, 3), (2, 513, 3)]


def example(sizes, dtype, batch=(2, )):
    num_queries, num_keys, dims = sizes
    return [
        points(*batch, *shape, dtype=dtype)
        for shape in ((num_queries, dims), (num_keys, dims),
                      (num_queries, num_keys))
    ]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_partial_tiles(sizes, dtype):
    assert_equals_reference(
        *example(sizes, dtype), scale=max(1, sizes[-1] / 2))


@pytest.mark.parametrize('sizes', [(600, 3, 2), (5, 3, 2), (260, 1, 66)],
                         ids=str)
def test_more_work_than_blocks(sizes):
    """The emulated grid has 50 blocks; runs of tiles share their keys."""
    assert_equals_reference(
        *example(sizes, torch.float32, (61, 2)), scale=max(4, sizes[-1] / 2))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_aligned_rows_that_end_amid_a_vector(dtype):
    queries, keys, weight = example((9, 5, 72), dtype)
    queries[..., 71:] = keys[..., 71:] = torch.nan
    assert_equals_reference(
        queries[..., :71], keys[..., :71], weight, scale=36.0)


@pytest.mark.parametrize('sizes', [(3, 2, 5), (9, 10, 5)], ids=str)
def test_offsets_beyond_32_bits(far_apart, sizes):
    inputs = example(sizes, torch.float16, (2, 2))
    for place, tensor in enumerate(inputs):
        assert_equals_reference(
            *inputs[:place],
            far_apart(tensor),
            *inputs[place + 1:],
            scale=4.0)

    queries, keys, weight = inputs
    result = laplacian_kernel(queries, keys, 4.0)
    backward = torch.ops.mmlaplace.laplacian_kernel_backward
    torch.testing.assert_close(
        backward(weight, queries, keys, far_apart(result), 4.0),
        backward(weight, queries, keys, result, 4.0),
        rtol=0,
        atol=0)


def test_offsets_of_tiles_beyond_32_bits(far_apart):
    queries, keys, weight = example((260, 70, 1), torch.float16, ())
    assert_equals_reference(
        far_apart(queries, 2**24), far_apart(keys, 2**26), weight, scale=4.0)


def test_more_dimensions():
    assert_equals_reference(
        *example((5, 4, 3), torch.float32, (2, 3, 1, 2)), scale=4.0)


@pytest.mark.parametrize(
    'sizes, dtype, batch',
    [((140, 66, 65), torch.float32, 2), ((66, 140, 33), torch.float64, 2),
     ((600, 3, 2), torch.float16, 51)], ids=str)
def test_threads_in_any_order(monkeypatch, sizes, dtype, batch):
    """A missing barrier lets some order of the threads change the result."""
    queries, keys, weight = example(sizes, dtype, (batch, ))
    runs = []
    for order in ('forwards', 'backwards', 'random'):
        monkeypatch.setenv('MMLAPLACE_EMULATED_ORDER', order)
        inputs = [x.detach().requires_grad_() for x in (queries, keys)]
        result = laplacian_kernel(*inputs, 20.0)
        runs.append((result, *torch.autograd.grad(result, inputs, weight)))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
