import math
import subprocess
import sys

import pytest
import torch

from mmlaplace.ops import gaussian_kernel, laplacian_kernel

SIZES = [(1, 5), (5, 1), (1, 1), (17, 49)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def points(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def expanded_laplacian(queries, keys, scale):
    """The definition, word by word."""
    difference = queries[..., :, None, :] - keys[..., None, :, :]
    return torch.exp(-difference.abs().sum(-1) / scale)


def expanded_gaussian(queries, keys, scale):
    difference = queries[..., :, None, :] - keys[..., None, :, :]
    return torch.exp(-difference.square().sum(-1) / (2 * scale**2))


KERNELS = pytest.mark.parametrize(
    'kernel, expanded', [(laplacian_kernel, expanded_laplacian),
                         (gaussian_kernel, expanded_gaussian)],
    ids=['laplacian', 'gaussian'])


@KERNELS
@pytest.mark.parametrize('dims', [1, 3, 32])
@pytest.mark.parametrize('num_queries, num_keys', SIZES)
def test_equals_definition(kernel, expanded, num_queries, num_keys, dims):
    queries = points(2, 3, num_queries, dims)
    keys = points(2, 3, num_keys, dims)
    torch.testing.assert_close(
        kernel(queries, keys, 2.5),
        expanded(queries, keys, 2.5),
        rtol=1e-12,
        atol=1e-14)


@KERNELS
@pytest.mark.parametrize('dims', [1, 3])
@pytest.mark.parametrize('num_queries, num_keys', SIZES)
def test_gradcheck(kernel, expanded, num_queries, num_keys, dims):
    queries = points(2, num_queries, dims).requires_grad_()
    keys = points(2, num_keys, dims).requires_grad_()
    assert torch.autograd.gradcheck(kernel, (queries, keys))


def test_gradient_equals_definition_at_equal_points():
    queries = points(6, 4)
    keys = queries.clone()
    keys[1] += 1e-40
    gradients = []
    for kernel in (laplacian_kernel, expanded_laplacian):
        q = queries.clone().requires_grad_()
        k = keys.clone().requires_grad_()
        kernel(q, k, 4.0).square().sum().backward()
        gradients.append((q.grad, k.grad))
    torch.testing.assert_close(*gradients)

    # A point against itself alone: sign(0) is 0.
    point = points(1, 4).requires_grad_()
    laplacian_kernel(point, point.detach()).sum().backward()
    assert torch.equal(point.grad, torch.zeros(1, 4, dtype=torch.float64))


@pytest.mark.parametrize('num_queries, num_keys', [(13, 5), (5, 13)])
@pytest.mark.parametrize('block_elements', [1, 7 * 5 * 3, 2**24])
def test_blocks_do_not_change_the_result(monkeypatch, block_elements,
                                         num_queries, num_keys):
    monkeypatch.setattr('mmlaplace.ops.reference._CDIST_BLOCK_ELEMENTS',
                        block_elements)
    queries = points(2, num_queries, 3).requires_grad_()
    keys = points(2, num_keys, 3).requires_grad_()
    result = laplacian_kernel(queries, keys)
    torch.testing.assert_close(result, expanded_laplacian(queries, keys, 4.0))
    weight = points(2, num_queries, num_keys)
    torch.testing.assert_close(
        torch.autograd.grad((result * weight).sum(), (queries, keys)),
        torch.autograd.grad(
            (expanded_laplacian(queries, keys, 4.0) * weight).sum(),
            (queries, keys)))


@pytest.mark.parametrize('num_queries, num_keys', [(40, 4), (4, 40)])
def test_the_longer_side_is_split(monkeypatch, num_queries, num_keys):
    """Blocks of the shorter one would cost the square of the longer."""
    monkeypatch.setattr('mmlaplace.ops.reference._CDIST_BLOCK_ELEMENTS', 240)
    cdist, shapes = torch.cdist, []

    def spy(left, right, p):
        shapes.append((left.shape[-2], right.shape[-2]))
        return cdist(left, right, p=p)

    monkeypatch.setattr(torch, 'cdist', spy)
    laplacian_kernel(points(num_queries, 3), points(num_keys, 3))
    assert shapes == [(20, 4)] * 2


@KERNELS
def test_batch_shapes_broadcast(kernel, expanded):
    queries, keys = points(2, 1, 6, 3), points(4, 5, 3)
    result = kernel(queries, keys)
    assert result.shape == (2, 4, 6, 5)
    torch.testing.assert_close(result, expanded(queries, keys, 4.0))
    assert kernel(points(6, 3), points(5, 3)).shape == (6, 5)


@KERNELS
def test_any_memory_layout(kernel, expanded):
    base = points(3, 8, 14)
    queries = base[:, ::2].transpose(1, 2)[:, 1:12:2]
    keys = base[:1, :4].transpose(1, 2).expand(3, -1, -1)
    assert not queries.is_contiguous() and not keys.is_contiguous()
    torch.testing.assert_close(
        kernel(queries, keys), expanded(queries, keys, 4.0))


@KERNELS
@pytest.mark.parametrize('shapes', [((0, 4, 3), (0, 5, 3)),
                                    ((2, 0, 3), (2, 5, 3)),
                                    ((2, 4, 3), (2, 0, 3))])
def test_empty(kernel, expanded, shapes):
    queries, keys = (points(*shape).requires_grad_() for shape in shapes)
    result = kernel(queries, keys)
    assert result.shape == (*shapes[0][:2], shapes[1][1])
    result.sum().backward()
    assert torch.equal(queries.grad, torch.zeros_like(queries))
    assert torch.equal(keys.grad, torch.zeros_like(keys))


def test_more_matrices_than_a_grid_has_rows():
    """Beyond 65,535, where kernels with the batch on a grid axis fail."""
    queries, keys = points(70000, 2, 1), points(70000, 3, 1)
    torch.testing.assert_close(
        laplacian_kernel(queries, keys),
        expanded_laplacian(queries, keys, 4.0))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('autocast', [False, True])
def test_precision(dtype, autocast):
    """Computed in float32: no worse than rounding input and result."""
    queries = points(2, 33, 32, dtype=dtype).requires_grad_()
    keys = points(2, 17, 32, dtype=dtype).requires_grad_()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        result = laplacian_kernel(queries, keys)
    assert result.dtype == dtype
    expected = expanded_laplacian(queries.double(), keys.double(), 4.0)
    resolution = torch.finfo(dtype).eps
    torch.testing.assert_close(
        result.double(), expected, rtol=8 * resolution, atol=1e-7)
    result.double().sum().backward()
    assert queries.grad.dtype == dtype
    gradient, = torch.autograd.grad(expected.sum(), queries)
    torch.testing.assert_close(
        queries.grad.double(), gradient.double(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_error_at_most_twice_that_of_plain_torch(dtype):
    queries, keys = points(64, 32, dtype=dtype), points(49, 32, dtype=dtype)
    truth = expanded_laplacian(queries.float(), keys.float(), 4.0)
    plain = expanded_laplacian(queries, keys, 4.0)
    error = (laplacian_kernel(queries, keys).float() - truth).abs().max()
    assert error <= 2 * (plain.float() - truth).abs().max()


def test_mixed_dtypes_promote():
    assert laplacian_kernel(
        points(4, 3, dtype=torch.float32),
        points(5, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert laplacian_kernel(
        points(4, 3, dtype=torch.float16),
        points(5, 3, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize('scale', [0.0, -1.0, math.inf, math.nan])
def test_bad_scale(scale):
    with pytest.raises(ValueError, match=f'scale must be .* got {scale}'):
        laplacian_kernel(points(4, 3), points(5, 3), scale)


def test_bad_tensors():
    with pytest.raises(ValueError, match=r'agree in dimension -1.*\(4, 3\)'):
        laplacian_kernel(points(4, 3), points(5, 2))
    with pytest.raises(ValueError, match='keys must have 2 or more dim'):
        laplacian_kernel(points(4, 3), points(3))
    with pytest.raises(TypeError, match='queries .* torch.int64'):
        laplacian_kernel(torch.zeros(4, 3, dtype=torch.int64), points(5, 3))
    with pytest.raises(TypeError, match='keys must be a tensor'):
        laplacian_kernel(points(4, 3), None)
    with pytest.raises(ValueError, match='one device.*meta'):
        laplacian_kernel(points(4, 3), points(5, 3).to('meta'))


MEASURE_PEAK = """
import re, torch
from mmlaplace.ops import laplacian_kernel
def peak():
    with open('/proc/self/status') as file:
        return 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', file.read())[1])
def run(tokens):
    queries = torch.randn(1, 8, tokens, 32, requires_grad=True)
    keys = torch.randn(1, 8, 49, 32, requires_grad=True)
    before = peak()
    laplacian_kernel(queries, keys).sum().backward()
    return peak() - before
run(64)
print(run(16800))
"""


@pytest.mark.skipif(
    sys.platform != 'linux', reason='peak memory is read from /proc')
def test_peak_memory_is_below_eight_results():
    output = subprocess.run([sys.executable, '-c', MEASURE_PEAK],
                            check=True,
                            capture_output=True,
                            text=True).stdout
    assert 0 < int(output) < 8 * (8 * 16800 * 49 * 4)
