"""What the emulated attention has to pass beside the tests of all backends.

`test_cuda_emulation.py` runs this in a process that emulates CUDA.
"""
import pytest
import torch
from test_laplacian_attention import (
    DTYPES,
    assert_as_good_as_reference,
    attend,
    attention_example,
    entry_point,
    plain_attention,
)

# Queries, keys, landmarks, channels and channels of values. A tile has 64
# tokens, landmarks and values, or 32 in float64, and half as many channels.
SIZES = [(1, 1, 1, 1, 1), (17, 13, 5, 7, 9), (32, 64, 16, 32, 32),
         (65, 33, 49, 16, 33), (63, 66, 31, 33, 65), (9, 31, 67, 17, 64),
         (40, 7, 130, 3, 2)]


@pytest.mark.parametrize(
    'whitening, dtype',
    [*(('scaled', dtype) for dtype in DTYPES), ('literal', torch.float64),
     ('none', torch.float32)],
    ids=str)
@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_partial_tiles(sizes, whitening, dtype):
    inputs, weight = attention_example(sizes, batch=(2, ))
    assert_as_good_as_reference([x.to(dtype) for x in inputs],
                                weight.to(dtype),
                                whitening=whitening,
                                num_iters=3)


def test_ties():
    """Where a point and a landmark agree, the distance has no gradient."""
    inputs, weight = attention_example((33, 34, 9, 5, 3), batch=(2, ))
    inputs[:4] = [(2 * x).round() / 2 for x in inputs[:4]]
    assert_as_good_as_reference(inputs, weight, num_iters=3)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    'sizes',
    # Chunks have 512 tokens or less, a multiple of a tile.
    [(512, 513, 3, 2, 2), (1030, 1537, 4, 3, 1), (1, 2100, 2, 1, 3)],
    ids=str)
def test_several_chunks(sizes, dtype):
    inputs, weight = attention_example(sizes, batch=(1, 2))
    for whitening in ('scaled', 'none'):
        assert_as_good_as_reference([x.to(dtype) for x in inputs],
                                    weight.to(dtype),
                                    whitening=whitening)


def test_more_work_than_blocks():
    """The emulated grid has 50 blocks, each of which takes several items."""
    inputs, weight = attention_example((3, 2, 2, 2, 2), batch=(60, 2))
    assert_as_good_as_reference(inputs, weight)


def test_more_moments_than_threads():
    """Those of several chunks are merged by blocks of 256 threads."""
    inputs, _ = attention_example((513, 1, 16, 1, 1), batch=(45, ))
    torch.testing.assert_close(entry_point(*inputs), plain_attention(*inputs))


def test_more_dimensions():
    inputs, weight = attention_example((5, 6, 3, 4, 2), batch=(2, 3, 1, 2))
    assert_as_good_as_reference(inputs, weight)


@pytest.mark.parametrize('sizes', [(0, 5, 2, 3, 6), (4, 5, 2, 3, 0)], ids=str)
def test_empty_of_more_dimensions(sizes):
    inputs, weight = attention_example(sizes, batch=(2, 1, 2))
    for found, expected in zip(
            attend(entry_point, inputs, weight),
            attend(plain_attention, inputs, weight)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('bits', [0x7fc00000, 0x7fffffff, -1], ids=hex)
def test_every_nan_passes_the_tensor_cores(bits):
    """Also those that overflow where a number is rounded to TF32."""
    inputs, weight = attention_example((5, 6, 3, 4, 2), batch=(2, ))
    inputs = [x.float() for x in inputs]
    inputs[0].view(torch.int32)[0, 1, 2] = bits
    output, *_ = attend(entry_point, inputs, weight.float(), whitening='none')
    expected = torch.zeros(2, 5, 2, dtype=torch.bool)
    expected[0, 1] = True
    assert torch.equal(output.isnan(), expected)


@pytest.mark.parametrize(
    'sizes, batch, stride',
    # Rows, tiles (of 32 tokens or landmarks) and chunks far apart.
    [((5, 6, 3, 4, 2), (2, 2), 2**31), ((40, 35, 34, 4, 2), (1, ), 2**26),
     ((530, 520, 3, 4, 2), (1, ), 2**23)], ids=str)
def test_rows_far_apart(far_apart, sizes, batch, stride):
    """Offsets that 32 bits do not hold."""
    (*tensors, gain), weight = attention_example(sizes, batch)
    assert_as_good_as_reference(
        [*(far_apart(x, stride) for x in tensors), gain],
        far_apart(weight, stride))


@pytest.mark.parametrize('whitening', ['scaled', 'none'])
@pytest.mark.parametrize(
    'sizes, dtype', [((70, 67, 66, 33, 65), torch.float32),
                     ((40, 33, 35, 17, 34), torch.float64),
                     ((530, 520, 3, 5, 2), torch.float32)], ids=str)
def test_threads_in_any_order(monkeypatch, sizes, dtype, whitening):
    """A missing barrier lets some order of the threads change the result."""
    inputs, weight = attention_example(sizes, batch=(1, ))
    inputs, weight = [x.to(dtype) for x in inputs], weight.to(dtype)
    runs = []
    for order in ('forwards', 'backwards', 'random'):
        monkeypatch.setenv('MMLAPLACE_EMULATED_ORDER', order)
        runs.append(
            attend(
                entry_point, inputs, weight, num_iters=2,
                whitening=whitening))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
