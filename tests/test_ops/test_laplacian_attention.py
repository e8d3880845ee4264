import itertools

import pytest
import torch

from mmlaplace.ops import laplacian_attention, pool_landmarks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHITENINGS = ['scaled', 'literal', 'none']


def tokens(*shape, dtype=torch.float64, spread=0.5):
    return (spread * torch.randn(*shape, dtype=torch.float64)).to(dtype)


def example(num_queries=20, num_keys=24, num_landmarks=6, dims=8,
            value_dims=5, batch=(2, 3), dtype=torch.float64):
    """Queries, keys, values and landmarks."""
    return (tokens(*batch, num_queries, dims, dtype=dtype),
            tokens(*batch, num_keys, dims, dtype=dtype),
            tokens(*batch, num_keys, value_dims, dtype=dtype, spread=1.0),
            tokens(*batch, num_landmarks, dims, dtype=dtype))


def dense_attention(queries, keys, values, landmarks=None,
                    query_landmarks=None, gain=1.0, scale=4.0,
                    kernel='laplacian', whitening='scaled', eps=1e-3):
    """The formulas with the N x M matrix written out."""

    def kernel_matrix(x, y):
        difference = x[..., :, None, :] - y[..., None, :, :]
        if kernel == 'laplacian':
            return torch.exp(-difference.abs().sum(-1) / scale)
        return torch.exp(-difference.square().sum(-1) / (2 * scale**2))

    if landmarks is None:
        attention = kernel_matrix(queries, keys)
    else:
        left = landmarks if query_landmarks is None else query_landmarks
        damped = kernel_matrix(left, landmarks) + eps * torch.eye(
            landmarks.shape[-2], dtype=queries.dtype)
        attention = kernel_matrix(queries, landmarks) @ torch.linalg.inv(
            damped) @ kernel_matrix(left, keys)
    if whitening != 'none':
        deviation = attention.var(-2, correction=0, keepdim=True)
        row_mean = attention.mean(-1, keepdim=True)
        attention = (attention - row_mean) / torch.sqrt(deviation + eps)
    factor = 1 if whitening == 'literal' else gain / keys.shape[-2]
    return factor * (attention @ values) + values.mean(-2, keepdim=True)


@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
@pytest.mark.parametrize('whitening', WHITENINGS)
@pytest.mark.parametrize('with_landmarks', [True, False])
def test_equals_dense_computation(kernel, whitening, with_landmarks):
    queries, keys, values, landmarks = example()
    options = dict(
        landmarks=landmarks if with_landmarks else None,
        scale=3.0,
        kernel=kernel,
        whitening=whitening,
        eps=2e-3)
    torch.testing.assert_close(
        laplacian_attention(
            queries, keys, values, num_iters=50, **options),
        dense_attention(queries, keys, values, **options),
        rtol=0,
        atol=1e-9)


@pytest.mark.parametrize('solver',
                         ['newton_schulz', 'conjugate_gradient', 'exact'])
def test_every_solver_converges_to_the_dense_computation(solver):
    queries, keys, values, landmarks = example()
    torch.testing.assert_close(
        laplacian_attention(
            queries, keys, values, landmarks, solver=solver, num_iters=50),
        dense_attention(queries, keys, values, landmarks),
        rtol=0,
        atol=1e-9)


@pytest.mark.parametrize('solver', ['newton_schulz', 'exact'])
def test_landmarks_of_queries_and_keys(solver):
    queries, keys, values, landmarks = example(num_landmarks=4)
    query_landmarks = tokens(2, 3, 4, 8)
    torch.testing.assert_close(
        laplacian_attention(
            queries,
            keys,
            values,
            landmarks,
            query_landmarks,
            solver=solver,
            num_iters=100),
        dense_attention(queries, keys, values, landmarks, query_landmarks),
        rtol=1e-8,
        atol=1e-8)


def test_equals_dense_computation_on_an_image():
    """The stage sizes of the backbone: 28 x 28 tokens, 7 x 7 landmarks."""
    queries, keys, values = (tokens(1, 2, 784, 32) for _ in range(3))
    landmarks = pool_landmarks(keys, (28, 28), (7, 7))
    torch.testing.assert_close(
        laplacian_attention(
            queries, keys, values, landmarks, num_iters=40),
        dense_attention(queries, keys, values, landmarks),
        rtol=0,
        atol=1e-9)


SIZES = [1, 15, 16, 17, 31, 33, 64, 65, 100]


@pytest.mark.parametrize(
    'num_queries, num_keys, num_landmarks, dims',
    # A Latin-square selection: every size appears in every place.
    [(size, SIZES[(i + 2) % 9], SIZES[(2 * i + 1) % 9], SIZES[-i])
     for i, size in enumerate(SIZES)])
def test_odd_sizes(num_queries, num_keys, num_landmarks, dims):
    queries, keys, values, landmarks = example(
        num_queries, num_keys, num_landmarks, dims, batch=(2, ))
    torch.testing.assert_close(
        laplacian_attention(
            queries, keys, values, landmarks, num_iters=50),
        dense_attention(queries, keys, values, landmarks),
        rtol=0,
        atol=1e-9)


def test_memory_around_the_input_is_not_read():
    """NaN beyond every slice stays outside."""
    tensors = []
    for tensor in example(17, 33, 5, 7):
        frame = torch.full([side + 2 for side in tensor.shape], torch.nan,
                           dtype=tensor.dtype)
        inside = frame[tuple(slice(1, -1) for _ in tensor.shape)]
        inside.copy_(tensor)
        tensors.append(inside)
    result = laplacian_attention(*tensors)
    assert result.isfinite().all()
    torch.testing.assert_close(
        result, laplacian_attention(*(t.contiguous() for t in tensors)))


def test_any_memory_layout():
    queries = tokens(2, 8, 3, 21).permute(0, 2, 3, 1)[..., ::2, :]
    keys = tokens(2, 1, 13, 8).expand(2, 3, -1, -1)
    values = tokens(2, 13, 3, 4).transpose(1, 2)
    landmarks = keys[..., 1::3, :]
    for tensor in (queries, keys, values, landmarks):
        assert not tensor.is_contiguous()
    torch.testing.assert_close(
        laplacian_attention(
            queries, keys, values, landmarks, num_iters=50),
        dense_attention(queries, keys, values, landmarks))


@pytest.mark.parametrize('whitening, solver',
                         [*((whitening, 'newton_schulz')
                            for whitening in WHITENINGS),
                          ('scaled', 'conjugate_gradient'),
                          ('scaled', 'exact')])
@pytest.mark.parametrize('with_landmarks', [True, False])
def test_gradcheck(whitening, solver, with_landmarks):
    """At the default iteration count, whatever it leaves of a residual."""
    inputs = [x.requires_grad_() for x in example(5, 6, 3, 2, 2, batch=(2, ))]
    gain = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def function(queries, keys, values, landmarks, gain):
        return laplacian_attention(
            queries,
            keys,
            values,
            landmarks if with_landmarks else None,
            gain=gain,
            whitening=whitening,
            solver=solver)

    assert torch.autograd.gradcheck(function, (*inputs, gain))


def test_gradient_equals_dense_computation():
    inputs = [x.requires_grad_() for x in example()]
    weight = tokens(2, 3, 20, 5)
    gradients = [
        torch.autograd.grad((result * weight).sum(), inputs)
        for result in (laplacian_attention(*inputs, num_iters=50),
                       dense_attention(*inputs))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


def test_gain_is_per_head():
    inputs = example()
    gain = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    whole = laplacian_attention(*inputs)
    mean = inputs[2].mean(-2, keepdim=True)
    torch.testing.assert_close(
        laplacian_attention(*inputs, gain=gain),
        mean + gain[:, None, None] * (whole - mean))


def test_an_image_does_not_depend_on_its_batch():
    inputs = example(batch=(4, 3))
    torch.testing.assert_close(
        laplacian_attention(*inputs)[1:2],
        laplacian_attention(*(x[1:2] for x in inputs)),
        rtol=1e-12,
        atol=1e-14)


def test_scaled_output_does_not_grow_with_the_tokens():
    """The literal form grows like the square root of their number."""
    spreads = {}
    for whitening, num_keys in itertools.product(['scaled', 'literal'],
                                                 [100, 6400]):
        result = laplacian_attention(
            tokens(64, 8),
            tokens(num_keys, 8),
            tokens(num_keys, 5, spread=1.0),
            tokens(16, 8),
            whitening=whitening)
        spreads[whitening, num_keys] = result.std(0).mean()
    assert spreads['scaled', 6400] < spreads['scaled', 100]
    growth = spreads['literal', 6400] / spreads['literal', 100]
    assert 4 < growth < 16


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('autocast', [False, True])
def test_precision(dtype, autocast):
    inputs = [x.requires_grad_() for x in example(dtype=dtype)]
    gain = torch.full((3, ), 1.5, dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        result = laplacian_attention(*inputs, gain=gain)
    assert result.dtype == dtype
    expected = dense_attention(*(x.double() for x in inputs), gain=1.5)
    torch.testing.assert_close(
        result.double(),
        expected,
        rtol=torch.finfo(dtype).eps,
        atol=1e-5 if dtype != torch.float64 else 1e-9)
    result.double().square().sum().backward()
    assert all(x.grad.dtype == dtype and x.grad.isfinite().all()
               for x in inputs)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_error_at_most_twice_that_of_plain_torch(dtype):
    inputs = example(dtype=dtype)
    single = [x.float() for x in inputs]
    truth = dense_attention(*single)
    inverse = torch.linalg.inv
    # The solve has no half precision form in torch; give the rival float32.
    try:
        torch.linalg.inv = lambda x: inverse(x.float()).to(x.dtype)
        plain = dense_attention(*inputs)
    finally:
        torch.linalg.inv = inverse
    error = (laplacian_attention(*inputs).float() - truth).abs().max()
    assert error <= 2 * (plain.float() - truth).abs().max()


@pytest.mark.parametrize('value', [0.0, 1.0, 255.0, -1e4])
@pytest.mark.parametrize('whitening', WHITENINGS)
@pytest.mark.parametrize('with_landmarks', [True, False])
@pytest.mark.parametrize('solver',
                         ['newton_schulz', 'conjugate_gradient', 'exact'])
def test_constant_input_stays_finite(value, whitening, with_landmarks,
                                     solver):
    """All landmarks equal: a kernel matrix of rank one."""
    inputs = [
        torch.full((2, 49, 8), value, requires_grad=True) for _ in range(3)
    ]
    landmarks = inputs[1][:, :9] if with_landmarks else None
    result = laplacian_attention(
        *inputs, landmarks, whitening=whitening, solver=solver)
    result.square().sum().backward()
    assert result.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_empty():
    for empty in (0, 1):
        shapes = [[2, 4, 3], [2, 5, 3], [2, 5, 6], [2, 2, 3]]
        if empty == 0:
            for shape in shapes:
                shape[0] = 0
        else:
            shapes[0][1] = 0
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        result = laplacian_attention(*inputs)
        assert result.shape == (*shapes[0][:2], 6)
        result.sum().backward()
        assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


def test_two_runs_are_equal_to_the_bit():
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        inputs = [
            x.requires_grad_()
            for x in example(300, 300, 49, 32, 32, dtype=torch.float32)
        ]
        result = laplacian_attention(*inputs)
        result.square().sum().backward()
        results.append([result, *(x.grad for x in inputs)])
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_bad_arguments():
    queries, keys, values, landmarks = example()
    with pytest.raises(ValueError, match='keys, values .* dimension -2'):
        laplacian_attention(queries, keys, values[..., :-1, :])
    with pytest.raises(ValueError, match='landmarks must agree in dim'):
        laplacian_attention(queries, keys, values, landmarks[..., :-1])
    with pytest.raises(ValueError, match='landmarks must hold 1 token'):
        laplacian_attention(queries, keys, values, landmarks[..., :0, :])
    with pytest.raises(ValueError, match='keys must hold 1 token'):
        laplacian_attention(queries, keys[..., :0, :], values[..., :0, :])
    with pytest.raises(ValueError, match="'scaled'.* got 'white'"):
        laplacian_attention(queries, keys, values, whitening='white')
    with pytest.raises(ValueError, match="'laplacian'.* got 'cauchy'"):
        laplacian_attention(queries, keys, values, kernel='cauchy')
    with pytest.raises(ValueError, match='eps must be .* got 0'):
        laplacian_attention(queries, keys, values, eps=0)
    with pytest.raises(ValueError, match='num_iters .* got -1'):
        laplacian_attention(queries, keys, values, num_iters=-1)
    with pytest.raises(ValueError, match="'newton_schulz'.* got 'qr'"):
        laplacian_attention(queries, keys, values, solver='qr')
    with pytest.raises(ValueError, match='query_landmarks need landmarks'):
        laplacian_attention(
            queries, keys, values, query_landmarks=landmarks)
    with pytest.raises(ValueError, match='agree in dimension -2'):
        laplacian_attention(queries, keys, values, landmarks,
                            landmarks[..., :-1, :])
    with pytest.raises(ValueError, match='needs a symmetric P'):
        laplacian_attention(queries, keys, values, landmarks, landmarks,
                            solver='conjugate_gradient')
    with pytest.raises(TypeError, match='mask'):
        laplacian_attention(queries, keys, values, mask=None)
