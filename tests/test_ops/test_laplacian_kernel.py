import itertools
import math
import subprocess
import sys

import pytest
import torch

from mmlaplace.ops import gaussian_kernel, laplacian_kernel, reference

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
    result = reference.laplacian_kernel(queries, keys, 4.0)
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
    reference.l1_distance(points(num_queries, 3), points(num_keys, 3))
    assert shapes == [(20, 4)] * 2


ODD = [1, 15, 16, 17, 31, 33, 64, 65, 100]


def assert_equals_reference(queries, keys, weight, scale):
    """Hold result and gradients to those of the reference in float64.

    To the precision of the dtype: the result relative to each element, a
    gradient relative to the sum of the magnitudes of its terms.
    """
    queries, keys = (x.detach().requires_grad_() for x in (queries, keys))
    result = laplacian_kernel(queries, keys, scale)
    gradients = torch.autograd.grad(result, (queries, keys), weight)
    truth = [x.detach().double().requires_grad_() for x in (queries, keys)]
    expected = reference.laplacian_kernel(*truth, scale)
    expected_gradients = torch.autograd.grad(
        expected, truth, weight.double())

    eps = torch.finfo(queries.dtype).eps
    # Rounding the distance, which is divided by scale, costs the kernel
    # more than the exponential does.
    wide_eps = torch.finfo(torch.promote_types(
        queries.dtype, torch.float32)).eps
    tolerance = eps + 32 * wide_eps
    torch.testing.assert_close(
        result.double(), expected, rtol=tolerance,
        atol=2 * torch.finfo(queries.dtype).smallest_normal * eps)
    terms = (expected * weight.double()).abs() / scale
    for x, actual, exact, total in zip(
            (queries, keys), gradients, expected_gradients,
            (terms.sum(-1), terms.sum(-2))):
        assert actual.dtype == x.dtype and actual.shape == x.shape
        error = (actual.double() - exact).abs()
        assert (error <= 2 * tolerance * total[..., None] + 1e-7 * eps).all()


def test_every_size(native):
    for num_queries, num_keys, dims in itertools.product(ODD, ODD, ODD):
        example = (points(num_queries, dims), points(num_keys, dims),
                   points(num_queries, num_keys))
        for dtype in (torch.float32, torch.float64):
            assert_equals_reference(
                *(x.to(dtype) for x in example), scale=max(1, dims / 2))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(
    'num_queries, num_keys, dims',
    # A Latin-square selection: every size appears in every place.
    [(size, ODD[(i + 2) % 9], ODD[-i]) for i, size in enumerate(ODD)]
    # The native backward works through the longer side in chunks of 1024
    # points, and of more where the shorter one is long too.
    + [(1024, 16, 8), (2049, 3, 5), (3, 2049, 5), (2500, 270, 4)])
def test_odd_sizes(backend, num_queries, num_keys, dims, dtype):
    assert_equals_reference(
        points(2, num_queries, dims, dtype=dtype),
        points(2, num_keys, dims, dtype=dtype),
        points(2, num_queries, num_keys, dtype=dtype),
        scale=max(1, dims / 2))


@pytest.mark.parametrize('sizes', [(17, 5, 7), (5, 17, 16), (16, 16, 16)])
def test_any_memory_layout(backend, sizes, layout):
    num_queries, num_keys, dims = sizes
    example = [layout(points(2, 3, *shape)) for shape in (
        (num_queries, dims), (num_keys, dims), (num_queries, num_keys))]
    assert not any(x.is_contiguous() for x in example)
    assert_equals_reference(*example, scale=4.0)
    assert_equals_reference(*(x.float() for x in example), scale=4.0)


@KERNELS
def test_batch_shapes_broadcast(kernel, expanded):
    queries = points(2, 1, 6, 3).requires_grad_()
    keys = points(4, 5, 3).requires_grad_()
    result, expected = kernel(queries, keys), expanded(queries, keys, 4.0)
    assert result.shape == (2, 4, 6, 5)
    torch.testing.assert_close(result, expected)
    weight = points(2, 4, 6, 5)
    torch.testing.assert_close(
        torch.autograd.grad(result, (queries, keys), weight),
        torch.autograd.grad(expected, (queries, keys), weight))
    assert kernel(points(6, 3), points(5, 3)).shape == (6, 5)


@KERNELS
def test_any_memory_layout_of_either_kernel(kernel, expanded):
    base = points(3, 8, 14)
    queries = base[:, ::2].transpose(1, 2)[:, 1:12:2]
    keys = base[:1, :4].transpose(1, 2).expand(3, -1, -1)
    assert not queries.is_contiguous() and not keys.is_contiguous()
    torch.testing.assert_close(
        kernel(queries, keys), expanded(queries, keys, 4.0))


@KERNELS
@pytest.mark.parametrize('shapes', [((0, 4, 3), (0, 5, 3)),
                                    ((2, 0, 3), (2, 5, 3)),
                                    ((2, 4, 3), (2, 0, 3)),
                                    ((2, 4, 0), (2, 5, 0))])
def test_empty(backend, kernel, expanded, shapes):
    queries, keys = (points(*shape).requires_grad_() for shape in shapes)
    result = kernel(queries, keys)
    assert result.shape == (*shapes[0][:2], shapes[1][1])
    # Points without channels are all the same point.
    assert torch.equal(result, torch.ones_like(result))
    result.sum().backward()
    assert torch.equal(queries.grad, torch.zeros_like(queries))
    assert torch.equal(keys.grad, torch.zeros_like(keys))


def test_more_matrices_than_a_grid_has_rows(backend):
    """Beyond 65,535, where kernels with the batch on a grid axis fail."""
    assert_equals_reference(
        points(70000, 2, 1),
        points(70000, 3, 1),
        points(70000, 2, 3),
        scale=4.0)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 3e-7),
                                              (torch.float64, 1e-15)])
@pytest.mark.parametrize('num_keys', [1, 5, 8, 16, 50, 64])
def test_exponential_is_accurate(backend, dtype, tolerance, num_keys):
    """From distance 0 to where nothing is left, in lanes and remainders."""
    distance = torch.cat([
        torch.zeros(1),
        torch.logspace(-9, 4, 2000),
        torch.linspace(0, 110, 2000),
        torch.linspace(650, 760, 2000)
    ]).to(dtype)
    result = laplacian_kernel(distance[:, None],
                              torch.zeros(num_keys, 1, dtype=dtype), 1.0)
    expected = torch.exp(-distance.double())[:, None].expand_as(result)
    smallest = torch.finfo(dtype).smallest_normal
    normal = expected >= smallest
    error = (result.double() / expected - 1).abs()
    assert error[normal].max() <= tolerance
    # Below, a backend may round to zero.
    assert result[~normal].max() <= smallest and result.min() >= 0
    assert result[0].min() == 1
    assert result[distance >= (746 if dtype == torch.float64 else 104)
                  ].max() == 0


@pytest.mark.parametrize('num_keys', [5, 16, 37])
@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_nonfinite_points_keep_to_themselves(backend, value, num_keys):
    queries, keys = points(9, 3).float(), points(num_keys, 3).float()
    usual = laplacian_kernel(queries, keys)
    queries[2, 1] = keys[3, 1] = value
    result = laplacian_kernel(queries, keys)
    # inf - inf is NaN.
    usual[2] = usual[:, 3] = math.nan if math.isnan(value) else 0
    usual[2, 3] = math.nan
    torch.testing.assert_close(result, usual, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize('sizes', [(3000, 49), (49, 3000), (300, 300)])
def test_same_bits_on_any_number_of_threads(native, set_num_threads, sizes):
    queries, keys = (points(2, size, 9).float().requires_grad_()
                     for size in sizes)
    weight = points(2, *sizes).float()
    runs = []
    for count in (1, 1, 2, 3):
        set_num_threads(count)
        result = laplacian_kernel(queries, keys)
        runs.append((result, *torch.autograd.grad(result, (queries, keys),
                                                  weight)))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


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
