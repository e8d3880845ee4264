import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d

from mmlaplace.ops import pool_landmarks


@pytest.mark.parametrize('size, grid', [((56, 56), (7, 7)), ((7, 7), (7, 7)),
                                        ((13, 19), (7, 7)), ((1, 5), (1, 3)),
                                        ((25, 42), (4, 6))])
def test_equals_adaptive_average_pooling(size, grid):
    image = torch.randn(2, 3, 8, *size, dtype=torch.float64)
    expected = adaptive_avg_pool2d(image.flatten(0, 1), grid)
    expected = expected.unflatten(0, (2, 3)).flatten(-2).mT
    keys = image.flatten(-2).mT
    torch.testing.assert_close(pool_landmarks(keys, size, grid), expected)


@pytest.mark.parametrize('size, grid', [((13, 19), (7, 7)), ((9, 8), (2, 5))])
def test_every_token_counts(size, grid):
    keys = torch.randn(1, size[0] * size[1], 1).requires_grad_()
    pool_landmarks(keys, size, grid).sum().backward()
    assert keys.grad.min() > 0


def test_gradcheck():
    keys = torch.randn(2, 15, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(pool_landmarks, (keys, (3, 5), (2, 2)))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_is_averaged_in_float32(dtype):
    keys = torch.randn(3, 56 * 56, 8).to(dtype)
    with torch.autocast('cpu', torch.bfloat16):
        landmarks = pool_landmarks(keys, (56, 56), (1, 1))
    assert landmarks.dtype == dtype
    torch.testing.assert_close(
        landmarks, keys.double().mean(-2, keepdim=True).to(dtype))


def test_bad_arguments():
    keys = torch.zeros(2, 15, 4)
    with pytest.raises(ValueError, match=r'15 tokens, got \(3, 4\)'):
        pool_landmarks(keys, (3, 4), (2, 2))
    with pytest.raises(ValueError, match=r'size \(3, 5\), got \(2, 6\)'):
        pool_landmarks(keys, (3, 5), (2, 6))
    with pytest.raises(ValueError, match=r'got \(0, 2\)'):
        pool_landmarks(keys, (3, 5), (0, 2))
