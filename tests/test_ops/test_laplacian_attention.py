import itertools

import pytest
import torch

from mmlaplace.ops import laplacian_attention, pool_landmarks, reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHITENINGS = ['scaled', 'literal', 'none']
# Without landmarks the kernel is exact, an operator that only CPUs have.
EXACT = pytest.param(None, id='exact')
WITH_OR_WITHOUT_LANDMARKS = pytest.mark.parametrize(
    'with_landmarks', [True, False], ids=['landmarks', 'exact'])


def name_sizes(sizes):
    return f'{sizes}' if None not in sizes else f'exact {sizes}'


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
@WITH_OR_WITHOUT_LANDMARKS
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


def plain_attention(*inputs, num_iters=12, whitening='scaled'):
    """The reference as the native operators have it."""
    queries, keys, values, *landmarks, gain = inputs
    return reference.laplacian_attention(
        queries, keys, values, *landmarks or [None], None, gain, 4.0,
        reference.laplacian_kernel, whitening, 'newton_schulz', num_iters,
        1e-3)


def entry_point(*inputs, **options):
    *tensors, gain = inputs
    return laplacian_attention(*tensors, gain=gain, **options)


def attend(function, inputs, weight, **options):
    """The output and, for a weight of its elements, the gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = function(*inputs, **options)
    gradients = torch.autograd.grad(
        output, inputs, weight, allow_unused=True, materialize_grads=True)
    return output.detach(), *gradients


def assert_as_good_as_reference(inputs, weight, **options):
    """Hold output and gradients to those of the reference in float64.

    The error is at most eight times that of the reference in float32, and a
    few units of rounding. In float64, which has rounded the truth too, it is
    as many times less as the resolution is finer, and four times more.
    """
    truth, plain = (
        attend(plain_attention, [x.to(dtype) for x in inputs],
               weight.to(dtype), **options)
        for dtype in (torch.float64, torch.float32))
    found = attend(entry_point, inputs, weight, **options)
    limits = torch.finfo(weight.dtype)
    single_eps = torch.finfo(torch.float32).eps
    wide_eps = min(limits.eps, single_eps)
    margin = 8 if wide_eps == single_eps else 32 * wide_eps / single_eps
    for actual, rival, exact, like in zip(found, plain, truth,
                                          (weight, *inputs)):
        assert actual.dtype == like.dtype and actual.shape == like.shape
        # Of the gradient of gains and of all others for each matrix.
        dims = (-2, -1) if like.dim() > 2 else ()
        error, allowed = ((x.double() - exact).abs().amax(dims)
                          for x in (actual, rival))
        # Of a single matrix the rival may be right by chance.
        allowed = allowed.max() * margin
        rounding = limits.eps * limits.smallest_normal + (
            limits.eps + 32 * wide_eps) * exact.abs().amax(dims)
        assert (error <= allowed + rounding).all()


def attention_example(sizes, batch=(2, 3)):
    """Inputs with a gain for each matrix, and a weight for the output.

    Without landmarks if there shall be None of them.
    """
    gain = 0.5 + torch.rand(batch, dtype=torch.float64)
    num_queries, num_keys, num_landmarks, dims, value_dims = sizes
    queries, keys, values, landmarks = example(
        num_queries, num_keys, num_landmarks or 0, dims, value_dims, batch)
    # Landmarks of few channels would nearly coincide.
    spread = max(1, 8 / dims) if dims else 1
    inputs = [spread * queries, spread * keys, values]
    if num_landmarks is not None:
        inputs.append(spread * landmarks)
    return ([*inputs, gain],
            tokens(*batch, num_queries, value_dims, spread=1.0))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('whitening', WHITENINGS)
@pytest.mark.parametrize(
    'sizes',
    # Queries, keys, landmarks, channels and channels of values.
    [(size, SIZES[(i + 2) % 9], num_landmarks, SIZES[-i],
      SIZES[(4 * i + 3) % 9]) for i, size in enumerate(SIZES)
     for num_landmarks in (SIZES[(2 * i + 1) % 9], None)],
    ids=name_sizes)
def test_odd_sizes_in_every_dtype(backend, sizes, whitening, dtype):
    inputs, weight = attention_example(sizes)
    assert_as_good_as_reference([x.to(dtype) for x in inputs],
                                weight.to(dtype),
                                whitening=whitening)


@pytest.mark.parametrize('whitening', WHITENINGS)
@pytest.mark.parametrize(
    'sizes',
    # Native chunks are of 1024 tokens, or of 32 for each landmark, or of as
    # many as a fourth of the keys where these are the landmarks.
    [(1024, 1025, 5, 3, 16), (2500, 2100, 9, 16, 5), (1700, 3300, 49, 8, 8),
     (1024, 1025, None, 3, 16), (2500, 2100, None, 16, 5),
     (1500, 4500, None, 8, 8)],
    ids=name_sizes)
def test_many_tokens(backend, sizes, whitening):
    inputs, weight = attention_example(sizes, batch=(2, ))
    for dtype in (torch.float32, torch.float64):
        assert_as_good_as_reference([x.to(dtype) for x in inputs],
                                    weight.to(dtype),
                                    whitening=whitening)


@pytest.mark.parametrize('num_landmarks', [6, EXACT])
def test_many_tokens_far_from_the_origin(backend, num_landmarks):
    """Kernels that hardly vary: moments must not cancel."""
    inputs, weight = attention_example((1500, 1300, num_landmarks, 4, 4),
                                       batch=(2, ))
    inputs[0] = 100 + 1e-3 * inputs[0]
    inputs[1] = 100 + 1e-3 * inputs[1]
    inputs[2] = 50 + inputs[2]
    if num_landmarks is not None:
        inputs[3] = 100 + inputs[3]
    assert_as_good_as_reference([x.float() for x in inputs], weight.float())


@pytest.mark.parametrize('num_iters', [0, 1, 12])
@pytest.mark.parametrize('spread', [0.0, 1e-4, 0.02, 0.2])
def test_nearly_equal_landmarks(backend, spread, num_iters):
    inputs, weight = attention_example((50, 60, 49, 32, 32))
    inputs[3] = spread * inputs[3]
    for dtype in (torch.float32, torch.float64):
        assert_as_good_as_reference([x.to(dtype) for x in inputs],
                                    weight.to(dtype),
                                    num_iters=num_iters)


def test_more_landmarks_than_tokens(backend):
    """Beyond 256 landmarks the inverse is computed another way."""
    inputs, weight = attention_example((7, 9, 257, 8, 3), batch=(2, ))
    assert_as_good_as_reference([x.float() for x in inputs], weight.float(),
                                num_iters=3)


def test_more_matrices_than_a_grid_has_rows(backend):
    """Beyond 65,535, where kernels with the batch on a grid axis fail."""
    inputs, weight = attention_example((2, 3, 2, 1, 1), batch=(70000, ))
    assert_as_good_as_reference(inputs, weight)


@pytest.mark.parametrize('sizes', [
    (17, 13, 5, 7, 9), (20, 24, 6, 16, 16), (17, 13, None, 7, 9),
    (20, 24, None, 16, 16)], ids=name_sizes)
def test_any_memory_layout(backend, sizes, layout):
    (*tensors, gain), weight = attention_example(sizes)
    tensors, weight = [layout(x) for x in tensors], layout(weight)
    assert not any(x.is_contiguous() for x in (*tensors, weight))
    torch.testing.assert_close(
        attend(entry_point, [*tensors, gain.mT.contiguous().mT], weight),
        attend(plain_attention, [*(x.contiguous() for x in tensors), gain],
               weight.contiguous()))


@pytest.mark.parametrize('whitening, solver',
                         [*((whitening, 'newton_schulz')
                            for whitening in WHITENINGS),
                          ('scaled', 'conjugate_gradient'),
                          ('scaled', 'exact')])
@WITH_OR_WITHOUT_LANDMARKS
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


@pytest.mark.parametrize('num_landmarks', [6, EXACT])
@pytest.mark.parametrize('shape', [(), (3, ), (1, 3), (2, 1), (2, 3)])
def test_gain_broadcasts(backend, shape, num_landmarks):
    inputs, weight = attention_example((20, 24, num_landmarks, 8, 5))
    inputs[-1] = torch.rand(shape, dtype=torch.float64)
    torch.testing.assert_close(
        attend(entry_point, inputs, weight),
        attend(plain_attention, inputs, weight))


def test_gain_keeps_its_dtype(backend):
    """It is summed over images, for which half precision is too coarse."""
    inputs, weight = attention_example((20, 24, 6, 8, 5))
    inputs = [*(x.bfloat16() for x in inputs[:4]), inputs[4].float()]
    output, *gradients = attend(entry_point, inputs, weight.bfloat16())
    assert output.dtype == torch.bfloat16
    assert gradients[4].dtype == torch.float32
    exact = attend(plain_attention, [x.double() for x in inputs],
                   weight.bfloat16().double())[5]
    torch.testing.assert_close(gradients[4].double(), exact, rtol=1e-4,
                               atol=1e-5)


@pytest.mark.parametrize('num_landmarks', [6, EXACT])
@pytest.mark.parametrize('whitening', WHITENINGS)
def test_without_gain(backend, whitening, num_landmarks):
    (*inputs, _), _ = attention_example((20, 24, num_landmarks, 8, 5))
    ones = torch.ones(2, 3, dtype=torch.float64)
    torch.testing.assert_close(
        laplacian_attention(*inputs, whitening=whitening),
        plain_attention(*inputs, ones, whitening=whitening))


@WITH_OR_WITHOUT_LANDMARKS
def test_batch_shapes_and_dtypes_unite(backend, with_landmarks):
    tensors = example(batch=())
    tensors = tensors if with_landmarks else tensors[:3]
    shapes = (2, 1), (3, ), (1, 3), ()
    inputs = [
        x.expand(*shape, *x.shape).clone() + tokens(*shape, 1, 1)
        for x, shape in zip(tensors, shapes)
    ]
    inputs[1] = inputs[1].float()
    gain = torch.ones((), dtype=torch.float64)
    weight = tokens(2, 3, 20, 5)
    found = attend(entry_point, [*inputs, gain], weight)
    whole = [x.double().expand(2, 3, *x.shape[-2:]) for x in inputs]
    expected = attend(plain_attention, [*whole, gain], weight)
    torch.testing.assert_close(found[0], expected[0])
    for x, actual, exact in zip(inputs, found[1:], expected[1:]):
        torch.testing.assert_close(
            actual, exact.sum_to_size(x.shape).to(x.dtype))


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
@WITH_OR_WITHOUT_LANDMARKS
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


@WITH_OR_WITHOUT_LANDMARKS
@pytest.mark.parametrize('whitening', WHITENINGS)
@pytest.mark.parametrize('batch, num_queries, value_dims', [
    ((0, ), 4, 6), ((2, 0), 4, 6), ((2, ), 0, 6), ((2, ), 4, 0)])
def test_empty(backend, batch, num_queries, value_dims, whitening,
               with_landmarks):
    inputs = [
        x.requires_grad_()
        for x in example(num_queries, 5, 2, 3, value_dims, batch)
    ]
    inputs = inputs if with_landmarks else inputs[:3]
    result = laplacian_attention(*inputs, whitening=whitening)
    assert result.shape == (*batch, num_queries, value_dims)
    result.sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


@WITH_OR_WITHOUT_LANDMARKS
def test_points_without_channels(backend, with_landmarks):
    """They are all the same, so the output is the mean of the values."""
    inputs = [x.requires_grad_() for x in example(dims=0)]
    inputs = inputs if with_landmarks else inputs[:3]
    result = laplacian_attention(*inputs)
    mean = inputs[2].mean(-2, keepdim=True).expand_as(result)
    torch.testing.assert_close(result, mean)


@pytest.mark.parametrize('num_landmarks', [49, EXACT])
def test_same_bits_on_any_number_of_threads(native, set_num_threads,
                                            num_landmarks):
    inputs, weight = attention_example((2500, 2100, num_landmarks, 32, 32),
                                       batch=(2, ))
    inputs, weight = [x.float() for x in inputs], weight.float()
    runs = []
    for count in (1, 1, 2, 3):
        set_num_threads(count)
        runs.append(attend(entry_point, inputs, weight))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


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


@WITH_OR_WITHOUT_LANDMARKS
@pytest.mark.parametrize('whitening', WHITENINGS)
def test_nan_of_a_query_reaches_all_that_it_whitens(backend, whitening,
                                                    with_landmarks):
    inputs = [tokens(2, *s) for s in ((20, 8), (24, 8), (24, 5), (6, 8))]
    inputs = inputs if with_landmarks else inputs[:3]
    inputs[0][0, 3, 1] = torch.nan
    result = laplacian_attention(*inputs, whitening=whitening)
    assert result[0, 3].isnan().all() and result[1].isfinite().all()
    others = result[0, 4:]
    assert (others.isfinite()
            if whitening == 'none' else others.isnan()).all()


def test_variance_is_not_negative(backend):
    """Nearly equal landmarks and a tiny eps: it cancels to below zero."""
    inputs = [
        torch.randn(32, 2, 1),
        torch.randn(32, 300, 1),
        torch.randn(32, 300, 2), 1e-4 * torch.randn(32, 16, 1)
    ]
    inputs = [x.requires_grad_() for x in inputs]
    result = laplacian_attention(*inputs, eps=1e-7, num_iters=60)
    assert result.isfinite().all()
    result.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
