import itertools

import pytest
import torch

from mmlaplace.ops import (
    laplacian_kernel,
    newton_schulz_inverse,
    newton_schulz_residual,
    reference,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def positive_definite(size, batch=(3, ), condition=100.0):
    """Random symmetric matrices with eigenvalues from 1 to ``condition``."""
    basis, _ = torch.linalg.qr(
        torch.randn(*batch, size, size, dtype=torch.float64))
    eigenvalues = torch.logspace(
        0, torch.tensor(condition).log10(), size, dtype=torch.float64)
    return basis * eigenvalues @ basis.mT


def landmark_kernel(size, spread):
    landmarks = spread * torch.randn(4, size, 32, dtype=torch.float64)
    return laplacian_kernel(landmarks, landmarks)


@pytest.mark.parametrize('size', [1, 2, 15, 49, 127, 129, 196])
@pytest.mark.parametrize('short_start', [False, True])
def test_inverts_positive_definite(size, short_start):
    matrix = positive_definite(size)
    inverse = newton_schulz_inverse(
        matrix, num_iters=40, eps=0, positive_definite=short_start)
    torch.testing.assert_close(
        inverse, torch.linalg.inv(matrix), rtol=1e-8, atol=1e-10)
    assert newton_schulz_residual(matrix, inverse, eps=0).max() < 1e-9


def test_inverts_nonsymmetric():
    matrix = torch.randn(5, 3, 20, 20, dtype=torch.float64)
    matrix += 3 * torch.eye(20, dtype=torch.float64)
    torch.testing.assert_close(
        newton_schulz_inverse(matrix, num_iters=60, eps=0),
        torch.linalg.inv(matrix),
        rtol=1e-6,
        atol=1e-8)


def test_short_start_halves_the_iterations():
    """Condition c takes about log2(c) iterations, without it 2 log2(c)."""
    matrix = positive_definite(30, condition=1000.0)
    residuals = [
        newton_schulz_residual(
            matrix,
            newton_schulz_inverse(matrix, 14, 0, positive_definite=short),
            eps=0).max() for short in (True, False)
    ]
    assert residuals[0] < 1e-3 < 1 < residuals[1]


def test_eps_is_added_to_the_diagonal():
    matrix = positive_definite(6)
    damped = matrix + 0.5 * torch.eye(6, dtype=torch.float64)
    inverse = newton_schulz_inverse(matrix, num_iters=40, eps=0.5)
    torch.testing.assert_close(inverse, torch.linalg.inv(damped))
    assert newton_schulz_residual(matrix, inverse, eps=0.5).max() < 1e-9
    assert newton_schulz_residual(matrix, inverse, eps=0).min() > 0.1


def test_each_matrix_has_its_own_start():
    """The result for a matrix does not depend on its batch."""
    matrix = positive_definite(9)
    together = newton_schulz_inverse(
        torch.stack([matrix[0], 1e6 * matrix[1]]), num_iters=5)
    alone = newton_schulz_inverse(matrix[0], num_iters=5)
    torch.testing.assert_close(together[0], alone, rtol=1e-14, atol=0)


@pytest.mark.parametrize('num_iters', [0, 3, 12])
@pytest.mark.parametrize('short_start', [False, True])
@pytest.mark.parametrize(
    'matrix',
    [
        positive_definite(5, batch=(2, )),
        torch.ones(8, 8, dtype=torch.float64),
        landmark_kernel(7, spread=0.2),
    ],
    ids=['random', 'rank one', 'landmarks'])
def test_gradcheck(matrix, short_start, num_iters):
    """The gradient is that of the iterations, converged or not."""
    matrix = matrix.clone().requires_grad_()
    assert torch.autograd.gradcheck(newton_schulz_inverse,
                                    (matrix, num_iters, 1e-3, short_start))


def test_converged_gradient_is_that_of_the_inverse():
    matrix = positive_definite(6).requires_grad_()
    weight = torch.randn(3, 6, 6, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((inverse * weight).sum(), matrix)[0]
        for inverse in (newton_schulz_inverse(matrix, 40, eps=0),
                        torch.linalg.inv(matrix))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


HARD = {
    'zero': torch.zeros(7, 7),
    'one': torch.ones(7, 7),
    'nearly singular': torch.ones(7, 7) + 1e-7 * torch.eye(7),
    'tiny': 1e-30 * positive_definite(7, batch=()).float(),
    'denormal': torch.full((7, 7), 1e-40),
    'huge': torch.full((7, 7), 3e38),
    'huge and tiny': torch.tensor([[3e38, 1e-38], [1e-38, 1e-38]]),
    'nilpotent': torch.triu(torch.ones(7, 7), 1),
    'permutation': torch.eye(7).roll(1, 0),
    'random': torch.rand(7, 7),
    'wide range': torch.logspace(-30, 30, 49).reshape(7, 7),
}


@pytest.mark.usefixtures('backend')
@pytest.mark.parametrize('num_iters', [0, 12, 100, 300])
@pytest.mark.parametrize('eps', [0, 1e-3])
@pytest.mark.parametrize('short_start', [False, True])
@pytest.mark.parametrize('matrix', HARD.values(), ids=HARD)
def test_stays_finite(matrix, short_start, eps, num_iters):
    """For every finite matrix, even one that breaks the short start."""
    inverse = newton_schulz_inverse(matrix, num_iters, eps, short_start)
    assert inverse.isfinite().all()


@pytest.mark.parametrize('num_iters', [0, 3])
@pytest.mark.parametrize('short_start', [False, True])
def test_beyond_the_limits_the_gradient_is_zero(backend, short_start,
                                                num_iters):
    """The inverse of a denormal number is held at the largest."""
    matrix = torch.tensor([[1e-39]])
    inverse, gradient = invert(newton_schulz_inverse, matrix, torch.ones(1, 1),
                               num_iters, 0, short_start)
    assert inverse == torch.finfo(torch.float32).max and gradient == 0


def test_tiny_matrix_is_inverted():
    matrix = 1e-30 * positive_definite(7, batch=()).float()
    inverse = newton_schulz_inverse(matrix, num_iters=30, eps=0)
    assert newton_schulz_residual(matrix, inverse, eps=0) < 1e-2


@pytest.mark.parametrize('spread', [0.0, 1e-4, 0.02, 0.2, 1.0])
def test_default_iterations_in_float32(spread):
    """Landmarks from all equal to far apart; gradients finite too."""
    matrix = landmark_kernel(49, spread).float().requires_grad_()
    inverse = newton_schulz_inverse(matrix, positive_definite=True)
    residual = newton_schulz_residual(matrix, inverse)
    # At no spread the damping alone keeps the matrix from rank one, and the
    # identity part of 48 dimensions has barely begun to be inverted.
    assert residual.max() <= (7.0 if spread < 0.02 else 0.1)
    inverse.square().sum().backward()
    assert matrix.grad.isfinite().all()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('autocast', [False, True])
def test_precision(dtype, autocast):
    matrix = positive_definite(17, condition=10.0).to(dtype)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        inverse = newton_schulz_inverse(matrix, 20, 0)
        residual = newton_schulz_residual(matrix, inverse, 0)
    assert inverse.dtype == residual.dtype == dtype
    # Only the result is rounded to half precision.
    torch.testing.assert_close(
        inverse.double(),
        torch.linalg.inv(matrix.double()),
        rtol=torch.finfo(dtype).eps,
        atol=1e-5 if dtype != torch.float64 else 1e-14)


def invert(function, matrix, weight, *options):
    """The inverse and, for a weight of its elements, the gradient."""
    matrix = matrix.detach().requires_grad_()
    inverse = function(matrix, *options)
    return inverse.detach(), *torch.autograd.grad(inverse, matrix, weight)


def assert_as_good_as_reference(matrix, *options):
    """Hold inverse and gradient to those of the reference in float64.

    The error is at most eight times that of the reference in float32, and a
    few units of rounding. In float64, which has rounded the truth too, it is
    as many times less as the resolution is finer, and four times more.
    """
    weight = torch.randn(matrix.shape, dtype=torch.float64).to(matrix.dtype)
    truth, plain = (
        invert(reference.newton_schulz_inverse, matrix.to(dtype),
               weight.to(dtype), *options)
        for dtype in (torch.float64, torch.float32))
    found = invert(newton_schulz_inverse, matrix, weight, *options)
    eps = torch.finfo(matrix.dtype).eps
    single_eps = torch.finfo(torch.float32).eps
    wide_eps = min(eps, single_eps)
    margin = 8 if wide_eps == single_eps else 32 * wide_eps / single_eps
    for actual, rival, exact in zip(found, plain, truth):
        assert actual.dtype == matrix.dtype and actual.shape == matrix.shape
        error, allowed = ((x.double() - exact).abs().amax((-2, -1))
                          for x in (actual, rival))
        # Of a single matrix the rival may be right by chance.
        allowed = allowed.max() * margin
        rounding = eps * torch.finfo(matrix.dtype).smallest_normal + (
            eps + 32 * wide_eps) * exact.abs().amax((-2, -1))
        assert (error <= allowed + rounding).all()


@pytest.mark.parametrize('short_start', [False, True])
@pytest.mark.parametrize(
    'size, num_iters',
    [*itertools.product([1, 2, 15, 16, 17, 31, 33, 64, 65, 100], [0, 1, 12]),
     # Beyond 256 the native operator takes torch's matrix products.
     *((size, 3) for size in (128, 129, 196, 256, 257, 300)),
     *((257, num_iters) for num_iters in (0, 1, 12))])
def test_every_size(backend, size, short_start, num_iters):
    matrix = positive_definite(size, batch=(2, ))
    if not short_start:
        matrix = matrix + torch.randn(2, size, size, dtype=torch.float64)
    for dtype in DTYPES if size < 100 else DTYPES[2:]:
        assert_as_good_as_reference(
            matrix.to(dtype), num_iters, 1e-3, short_start)


@pytest.mark.parametrize('size', [5, 49])
@pytest.mark.parametrize('spread', [0.0, 1e-4, 0.02, 0.2])
def test_nearly_equal_landmarks(backend, spread, size):
    """The kernel matrix is close to rank one and far from inverted."""
    matrix = landmark_kernel(size, spread)
    for dtype in (torch.float32, torch.float64):
        assert_as_good_as_reference(matrix.to(dtype), 12, 1e-3, True)


@pytest.mark.parametrize('size', [6, 33, 257])
def test_short_start_inverts_the_symmetric_part(backend, size):
    symmetric = positive_definite(size)
    skew = torch.randn(3, size, size, dtype=torch.float64)
    weight = torch.randn(3, size, size, dtype=torch.float64)
    options = 3, 1e-3, True
    inverse, gradient = invert(newton_schulz_inverse,
                               symmetric + skew - skew.mT, weight, *options)
    expected, _ = invert(newton_schulz_inverse, symmetric, weight, *options)
    torch.testing.assert_close(inverse, expected)
    torch.testing.assert_close(gradient, gradient.mT)


@pytest.mark.parametrize('short_start', [False, True])
@pytest.mark.parametrize('size', [9, 300])
def test_comes_to_rest(backend, size, short_start):
    """After a step that left only rounding, nothing is iterated."""
    matrix = positive_definite(size, (), condition=4.0).float()
    inverses = [
        newton_schulz_inverse(matrix, count, 0, short_start)
        for count in (22, 23, 40)
    ]
    assert torch.equal(inverses[0], inverses[1])
    assert torch.equal(inverses[0], inverses[2])


@pytest.mark.parametrize('size', [5, 16, 257])
def test_a_nan_stays_in_its_matrix(backend, size):
    matrix = positive_definite(size)
    usual = newton_schulz_inverse(matrix)
    usual[1] = torch.nan
    matrix[1, -1, -1] = torch.nan
    torch.testing.assert_close(
        newton_schulz_inverse(matrix), usual, equal_nan=True)


@pytest.mark.parametrize('layout', [
    'amid NaN', 'transposed', 'batch transposed', 'one in two',
    'one in three rows', 'expanded batch'
], indirect=True)
@pytest.mark.parametrize('short_start', [False, True])
@pytest.mark.parametrize('size', [1, 12, 16])
def test_any_memory_layout(backend, size, short_start, layout):
    matrix = layout(positive_definite(size, batch=(2, 3)))
    weight = layout(torch.randn(2, 3, size, size, dtype=torch.float64))
    assert size == 1 or not matrix.is_contiguous()
    options = 3, 0.1, short_start
    torch.testing.assert_close(
        invert(newton_schulz_inverse, matrix, weight, *options),
        invert(reference.newton_schulz_inverse, matrix, weight, *options))


def test_expanded_matrices_and_gradients(backend):
    matrix = torch.tensor(2.0).expand(3, 7, 7)
    weight = torch.tensor(-1.0).expand(3, 7, 7)
    torch.testing.assert_close(*(
        invert(function, matrix, weight, 3, 0.1, True)
        for function in (newton_schulz_inverse,
                         reference.newton_schulz_inverse)))


@pytest.mark.parametrize('short_start', [False, True])
def test_more_matrices_than_a_grid_has_rows(backend, short_start):
    """Beyond 65,535, where kernels with the batch on a grid axis fail."""
    matrix = 3 * torch.eye(2) + torch.rand(70000, 2, 2)
    assert_as_good_as_reference(matrix, 12, 1e-3, short_start)


@pytest.mark.parametrize('short_start', [False, True])
def test_same_bits_on_any_number_of_threads(native, set_num_threads,
                                            short_start):
    matrix = positive_definite(49, batch=(7, )).float()
    weight = torch.randn(7, 49, 49)
    runs = []
    for count in (1, 1, 2, 3):
        set_num_threads(count)
        runs.append(invert(newton_schulz_inverse, matrix, weight, 12, 1e-3,
                           short_start))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize('shape', [(0, 5, 5), (0, 300, 300), (3, 0, 0)])
def test_empty(backend, shape):
    matrix = torch.zeros(shape, requires_grad=True)
    inverse = newton_schulz_inverse(matrix)
    assert inverse.shape == shape
    inverse.sum().backward()
    assert matrix.grad.shape == shape
    assert newton_schulz_residual(matrix, inverse).shape == shape[:-2]


def test_bad_arguments():
    matrix = torch.eye(3)
    with pytest.raises(ValueError, match=r'square .* got shape \(3, 4\)'):
        newton_schulz_inverse(torch.ones(3, 4))
    with pytest.raises(ValueError, match='num_iters .* got -1'):
        newton_schulz_inverse(matrix, -1)
    with pytest.raises(ValueError, match='eps .* got -0.1'):
        newton_schulz_inverse(matrix, eps=-0.1)
    with pytest.raises(ValueError, match='eps .* got nan'):
        newton_schulz_inverse(matrix, eps=float('nan'))
    with pytest.raises(TypeError, match='torch.int64'):
        newton_schulz_inverse(torch.eye(3, dtype=torch.int64))
    with pytest.raises(ValueError, match='matrix, inverse must agree'):
        newton_schulz_residual(matrix, torch.eye(4))
