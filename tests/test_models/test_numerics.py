"""Finite outputs and gradients for images that hold nothing or too much."""
import pytest
import torch
from torch.nn import functional as F

from mmlaplace.models import LaplacianFormer
from mmlaplace.ops import (
    gaussian_kernel,
    laplacian_attention,
    laplacian_kernel,
    newton_schulz_inverse,
)

NANO = dict(
    embed_dims=[8, 16, 24, 32], depths=[1, 2, 1, 1], num_heads=[1, 2, 3, 4])
SIZE = (3, 128, 96)
IMAGES = {
    'black': torch.zeros(SIZE),
    'white': torch.full(SIZE, 255.0),
    'constant': torch.tensor([-2.1, 0.3, 1.7])[:, None, None].expand(SIZE),
    'padded': F.pad(255 * torch.rand(3, 40, 30), (0, 66, 0, 88)),
    'scale 1e-30': 1e-30 * torch.randn(SIZE),
    'scale 1e4': 1e4 * torch.randn(SIZE),
    # Norms square their input: the largest power of ten whose squares, and
    # sums of them, are in the range of float32.
    'scale 1e16': 1e16 * torch.randn(SIZE),
}


def check_finite(model, images, autocast):
    """Require finite outputs, gradients and statistics.

    The loss weights elements unequally, so that norms pass a gradient on.
    """
    images = images.clone().requires_grad_()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        outputs = model(images)
        loss = sum((x.float() * torch.randn(x.shape)).sum() for x in outputs)
    loss.backward()
    assert all(x.isfinite().all() for x in outputs)
    assert images.grad.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
    for name, buffer in model.named_buffers():
        assert buffer.isfinite().all(), name


@pytest.mark.parametrize('arch', LaplacianFormer.arch_zoo)
@pytest.mark.parametrize('autocast', [False, True])
def test_every_arch(arch, autocast):
    """In full depth, of images that do not meet: stored statistics."""
    model = LaplacianFormer(arch, out_indices=(0, 1, 2, 3), norm_eval=True)
    model.init_weights()
    images = torch.stack([image[:, :64, :64] for image in IMAGES.values()])
    check_finite(model.train(), images, autocast)


@pytest.mark.parametrize('image', IMAGES)
@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('whitening', ['scaled', 'literal', 'none'])
def test_statistics_of_one_image(image, autocast, whitening):
    """Batch norms see nothing but this image."""
    model = LaplacianFormer(
        NANO, out_indices=(0, 1, 2, 3), whitening=whitening)
    model.init_weights()
    check_finite(model.train(), IMAGES[image][None], autocast)


@pytest.mark.parametrize('scale', [1e-30, 1e30, 1e100])
def test_float64(scale):
    model = LaplacianFormer(NANO, out_indices=(0, 1, 2, 3)).double()
    image = scale * torch.randn(1, *SIZE, dtype=torch.float64)
    check_finite(model.train(), image, autocast=False)


# The smallest and the largest scale whose results have the range to hold.
SCALES = {
    torch.float16: (1e-7, 5e4),
    torch.bfloat16: (1e-30, 1e37),
    torch.float32: (1e-40, 1e37),
    torch.float64: (1e-300, 1e300),
}
POINTS = [(dtype, scale) for dtype in SCALES for scale in SCALES[dtype]]


def draw(*shape, scale, dtype, constant):
    points = torch.ones(shape) if constant else torch.randn(shape)
    # Twice the scale is about the most that this many numbers reach.
    points = points.clamp(-2, 2).double() * (scale / 2)
    return points.to(dtype).requires_grad_()


def check_against_float64(function, inputs):
    """Require the result of float64, and finite gradients."""
    result = function(*inputs)
    assert result.dtype == inputs[0].dtype
    result.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    expected = function(*(x.detach().double() for x in inputs))
    # The condition of the damped kernel matrix is at least a thousand.
    compute_dtype = torch.promote_types(result.dtype, torch.float32)
    tolerance = max(2 * torch.finfo(result.dtype).eps,
                    1000 * torch.finfo(compute_dtype).eps)
    torch.testing.assert_close(
        result.double(),
        expected,
        rtol=0,
        atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize('dtype, scale', POINTS)
@pytest.mark.parametrize('constant', [False, True])
@pytest.mark.parametrize('whitening', ['scaled', 'none'])
@pytest.mark.parametrize('with_landmarks', [False, True])
def test_attention_of_far_points(backend, dtype, scale, constant, whitening,
                                 with_landmarks):
    """Of values that are not far, at which every result has the range."""
    inputs = [
        draw(2, 65, 8, scale=scale, dtype=dtype, constant=constant)
        for _ in range(2)
    ] + [draw(2, 65, 8, scale=1, dtype=dtype, constant=False)]

    def attend(queries, keys, values):
        return laplacian_attention(
            queries,
            keys,
            values,
            keys[:, ::7] if with_landmarks else None,
            whitening=whitening)

    check_against_float64(attend, inputs)


@pytest.mark.parametrize('scale', [1e-30, 1e30])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_attention_of_large_values(backend, dtype, scale):
    inputs = [
        draw(2, 65, 8, scale=size, dtype=dtype, constant=False)
        for size in (4, 4, scale)
    ]
    check_against_float64(
        lambda queries, keys, values: laplacian_attention(
            queries, keys, values, keys[:, ::7]), inputs)


@pytest.mark.parametrize('dtype, scale', POINTS)
@pytest.mark.parametrize('constant', [False, True])
def test_kernel_of_far_points(backend, dtype, scale, constant):
    inputs = [
        draw(2, 9, 8, scale=scale, dtype=dtype, constant=constant)
        for _ in range(2)
    ]
    check_against_float64(laplacian_kernel, inputs)


@pytest.mark.parametrize('dtype', SCALES)
def test_gaussian_kernel_of_far_points(dtype):
    """Squared distances have to have the range."""
    for scale in (1e-30, 5e4 if dtype == torch.float16 else 1e17):
        inputs = [
            draw(2, 9, 8, scale=scale, dtype=dtype, constant=False)
            for _ in range(2)
        ]
        check_against_float64(gaussian_kernel, inputs)


@pytest.mark.parametrize('positive_definite', [False, True])
@pytest.mark.parametrize('dtype, scale', [
    (torch.float16, 1e-2), (torch.float16, 1e3), (torch.bfloat16, 1e-15),
    (torch.bfloat16, 1e30), (torch.float32, 1e-15), (torch.float32, 1e30),
    (torch.float64, 1e-150), (torch.float64, 1e300)])
def test_inverse_of_any_scale(backend, dtype, scale, positive_definite):
    """The gradient, minus the square of the inverse, has the range."""
    matrix = (torch.eye(9) + torch.rand(2, 9, 9).tril(-1) / 9).double()
    matrix = ((matrix + matrix.mT) / 2 * scale).to(dtype).requires_grad_()
    check_against_float64(
        lambda x: newton_schulz_inverse(
            x, 30, eps=0, positive_definite=positive_definite), [matrix])
