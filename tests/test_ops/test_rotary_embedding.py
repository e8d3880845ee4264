import pytest
import torch

from mmlaplace.ops import rotary_embedding

SIZES = (1, 15, 16, 17, 31, 33)


def make_table(num_tokens, half, dtype=torch.float64):
    angles = torch.randn(num_tokens, half, dtype=dtype)
    return torch.stack([angles.cos(), angles.sin()])


def defined(tokens, table):
    """Channel pairs as complex numbers, turned by their angles."""
    first, second = tokens.to(table.dtype).chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(*table)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.usefixtures('backend')
@pytest.mark.parametrize('half', SIZES)
@pytest.mark.parametrize('num_tokens, heads', [(1, 3), (17, 1), (65, 5)])
def test_equals_definition(num_tokens, heads, half):
    tokens = torch.randn(
        2, num_tokens, heads, 2 * half, dtype=torch.float64).requires_grad_()
    table = make_table(num_tokens, half)
    result = rotary_embedding(tokens, table)
    torch.testing.assert_close(result, defined(tokens, table))
    grad = torch.randn_like(result)
    torch.testing.assert_close(
        torch.autograd.grad(result, tokens, grad),
        torch.autograd.grad(defined(tokens, table), tokens, grad))


@pytest.mark.usefixtures('backend')
def test_layouts(layout):
    tokens = torch.randn(2, 17, 3, 32)
    table = make_table(17, 16, torch.float32)
    torch.testing.assert_close(
        rotary_embedding(layout(tokens), table),
        defined(layout(tokens), table))


@pytest.mark.usefixtures('backend')
@pytest.mark.parametrize('leading', [(), (3, ), (2, 3), (0, )], ids=str)
def test_leading_dimensions(leading):
    tokens = torch.randn(*leading, 5, 2, 8)
    table = make_table(5, 4, torch.float32)
    torch.testing.assert_close(
        rotary_embedding(tokens, table), defined(tokens, table))


@pytest.mark.usefixtures('backend')
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_comes_back_in_float32(dtype):
    """Positions need more than half precision has."""
    tokens = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
    table = make_table(5, 4, torch.float32)
    result = rotary_embedding(tokens, table)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, defined(tokens, table))
    result.sum().backward()
    assert tokens.grad.dtype == dtype


@pytest.mark.usefixtures('backend')
def test_gradcheck():
    tokens = torch.randn(2, 3, 2, 6, dtype=torch.float64).requires_grad_()
    table = make_table(3, 3)
    assert torch.autograd.gradcheck(rotary_embedding, (tokens, table))
    assert torch.autograd.gradgradcheck(rotary_embedding, (tokens, table))


@pytest.mark.usefixtures('native')
@pytest.mark.parametrize('dtype', [torch.float16, torch.float32], ids=str)
def test_opcheck(dtype):
    tokens = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.mmlaplace.rotary_embedding,
                          (tokens, make_table(5, 4, torch.float32), True))


def test_bad_arguments():
    tokens = torch.zeros(2, 5, 3, 8)
    for table in (torch.zeros(2, 4, 4), torch.zeros(2, 5, 8),
                  torch.zeros(5, 4)):
        with pytest.raises(ValueError, match=r'table must have shape'):
            rotary_embedding(tokens, table)
    with pytest.raises(ValueError, match=r'table must have shape'):
        rotary_embedding(torch.zeros(5, 7), torch.zeros(2, 5, 3))
    with pytest.raises(TypeError, match='got torch.float16'):
        rotary_embedding(tokens, torch.zeros(2, 5, 4, dtype=torch.float16))
