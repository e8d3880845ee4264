import pytest
import torch

from mmlaplace.models import LaplacianAttention
from mmlaplace.models.laplacian_attention import rotary_table
from mmlaplace.ops import (
    laplacian_attention,
    pool_landmarks,
    rotary_embedding,
)


def test_equals_the_parts_written_out():
    """Projection, RoPE, pooling, kernel attention, convolution, output."""
    layer = LaplacianAttention(24, num_heads=3, landmark_grid=(2, 3)).double()
    torch.nn.init.normal_(layer.gain)
    size = (5, 7)
    x = torch.randn(2, 35, 24, dtype=torch.float64)

    queries, keys, values = (
        part.unflatten(-1, (3, 8)) for part in layer.qkv(x).chunk(3, dim=-1))
    table = rotary_table(size, 8, x)
    queries, keys, values = (
        part.transpose(1, 2)
        for part in (rotary_embedding(queries, table),
                     rotary_embedding(keys, table), values))
    landmarks = pool_landmarks(keys, size, (2, 3))
    attended = laplacian_attention(
        queries, keys, values, landmarks, gain=layer.gain)
    attended = attended.transpose(1, 2).flatten(2)
    image = values.transpose(1, 2).flatten(2).mT.unflatten(2, size)
    local = layer.local(image).flatten(2).mT
    torch.testing.assert_close(
        layer(x, size), layer.proj(attended + local))


def test_rotation_keeps_lengths_and_depends_on_offsets_only():
    size, dims = (6, 9), 8
    x = torch.randn(1, dims, dtype=torch.float64)
    y = torch.randn(1, dims, dtype=torch.float64)
    table = rotary_table(size, dims, x)
    x, y = rotary_embedding(torch.stack([x, y], 1).expand(54, -1, -1),
                            table).unbind(1)
    torch.testing.assert_close(x.norm(dim=-1), x.norm(dim=-1)[:1].expand(54))
    products = (x @ y.mT).unflatten(0, size).unflatten(-1, size)
    # The same offset of (2, 3) from three places.
    torch.testing.assert_close(products[0, 0, 2, 3], products[3, 5, 5, 8])
    torch.testing.assert_close(products[0, 0, 2, 3], products[1, 2, 3, 5])
    # It depends on the row, on the column, and tells them apart.
    assert (products[0, 0, 0, 0] - products[0, 0, 3, 0]).abs() > 1e-3
    assert (products[0, 0, 0, 0] - products[0, 0, 0, 3]).abs() > 1e-3
    assert (products[0, 0, 2, 3] - products[0, 0, 3, 2]).abs() > 1e-3


@pytest.mark.parametrize(
    'size, expected',
    [((56, 56), (7, 7)), ((7, 7), (7, 7)), ((5, 9), (5, 7)), ((1, 3), (1, 3))])
def test_landmark_grid(size, expected):
    layer = LaplacianAttention(8, 2, landmark_grid=(7, 7))
    assert layer.landmark_size(size) == expected


def test_landmark_ratio_takes_the_place_of_the_grid():
    layer = LaplacianAttention(8, 2, landmark_ratio=8)
    assert layer.landmark_size((200, 334)) == (25, 42)
    assert layer.landmark_size((3, 17)) == (1, 3)


def test_landmarks_no_coarser_than_the_map_give_the_exact_kernel():
    exact = LaplacianAttention(8, 2, landmark_grid=(7, 7))
    ratio = LaplacianAttention(8, 2, landmark_ratio=1)
    ratio.load_state_dict(exact.state_dict())
    x = torch.randn(1, 15, 8)
    torch.testing.assert_close(
        exact(x, (3, 5)), ratio(x, (3, 5)), rtol=0, atol=0)
    # A solve with undamped P would give the same up to its error.
    pooled = LaplacianAttention(8, 2, eps=1e-9, num_iters=40)
    pooled.load_state_dict(exact.state_dict())
    exact.options['eps'] = 1e-9
    pooled.landmark_size = lambda size: list(size)
    torch.testing.assert_close(
        exact.double()(x.double(), (3, 5)), pooled.double()(x.double(),
                                                            (3, 5)))


def test_gain_is_one_dimensional_and_absent_from_the_literal_form():
    assert LaplacianAttention(8, 2).gain.shape == (2, )
    assert LaplacianAttention(8, 2, whitening='none').gain.shape == (2, )
    assert LaplacianAttention(8, 2, whitening='literal').gain is None


def test_rope_makes_the_output_depend_on_position():
    x = torch.randn(1, 1, 8).expand(1, 12, 8)
    for rope, varies in ((True, True), (False, False)):
        layer = LaplacianAttention(8, 2, rope=rope)
        torch.nn.init.zeros_(layer.local.weight)
        output = layer(x, (3, 4))
        assert (output.std(1) > 1e-4).any() == varies


def test_softmax_is_scaled_dot_product_attention():
    layer = LaplacianAttention(24, num_heads=3, kernel='softmax').double()
    assert layer.gain is None
    torch.nn.init.zeros_(layer.local.weight)
    torch.nn.init.zeros_(layer.local.bias)
    size = (9, 10)
    x = torch.randn(2, 90, 24, dtype=torch.float64)
    queries, keys, values = (
        part.unflatten(-1, (3, 8)) for part in layer.qkv(x).chunk(3, dim=-1))
    table = rotary_table(size, 8, x)
    queries, keys, values = (
        part.transpose(1, 2)
        for part in (rotary_embedding(queries, table),
                     rotary_embedding(keys, table), values))
    weights = (queries @ keys.mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(
        layer(x, size),
        layer.proj((weights @ values).transpose(1, 2).flatten(2)))
    with torch.autocast('cpu', torch.bfloat16):
        assert layer.float()(x.float(), size).isfinite().all()


def test_repr_names_the_attention():
    assert 'kernel=softmax' in repr(LaplacianAttention(8, 2, kernel='softmax'))
    text = repr(LaplacianAttention(8, 2, kernel='gaussian'))
    assert 'landmark_grid=(7, 7)' in text and 'kernel=gaussian' in text
    assert 'landmark_ratio=8' in repr(
        LaplacianAttention(8, 2, landmark_ratio=8))


@pytest.mark.parametrize(
    'arguments, message',
    [(dict(num_heads=3), 'embed_dims must be a multiple .* got 8 and 3'),
     (dict(num_heads=4), 'multiple of 4 for rope, got 8 / 4'),
     (dict(landmark_grid=(7, )), r'landmark_grid .* got \(7,\)'),
     (dict(landmark_grid=(7, 0)), r'landmark_grid .* got \(7, 0\)'),
     (dict(landmark_ratio=0), 'landmark_ratio .* got 0'),
     (dict(scale=0), 'scale .* got 0'), (dict(eps=0), 'eps .* got 0'),
     (dict(num_iters=-1), 'num_iters .* got -1'),
     (dict(kernel='cauchy'), "kernel .* got 'cauchy'"),
     (dict(whitening='white'), "whitening .* got 'white'"),
     (dict(solver='qr'), "solver .* got 'qr'"),
     (dict(landmark_source='all'), "landmark_source .* got 'all'"),
     (dict(landmark_source='queries_and_keys', solver='conjugate_gradient'),
      "needs landmark_source 'keys'")])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        LaplacianAttention(8, **dict(dict(num_heads=2), **arguments))
