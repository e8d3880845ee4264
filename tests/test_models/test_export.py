"""The backbone under torch's tracing, exporting and compiling."""
import pytest
import torch

from mmlaplace.models import LaplacianFormer

ARCH = dict(
    embed_dims=[8, 16, 24, 32], depths=[1] * 4, num_heads=[1, 2, 3, 4])


@pytest.fixture
def model():
    return LaplacianFormer(
        ARCH, stem_channels=4, out_indices=(0, 1, 2, 3), drop_path_rate=0.0)


def test_trace_holds_for_another_image(model):
    """Nothing in forward depends on values."""
    model.eval()
    traced = torch.jit.trace(model, torch.randn(1, 3, 64, 96))
    image = 5 * torch.randn(1, 3, 64, 96) + 2
    torch.testing.assert_close(traced(image), model(image))


def test_export(model):
    model.eval()
    program = torch.export.export(model, (torch.randn(1, 3, 64, 96), ))
    image = 5 * torch.randn(1, 3, 64, 96) + 2
    torch.testing.assert_close(program.module()(image), model(image))


def test_compile_without_graph_breaks(model):
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    for size in ((64, 96), (97, 40)):
        gradients = []
        for function in (model, compiled):
            torch.manual_seed(0)
            model.zero_grad()
            outputs = function(torch.randn(2, 3, *size))
            sum(x.square().mean() for x in outputs).backward()
            gradients.append([*outputs, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
