"""The backbone under torch's tracing, exporting and compiling."""
import subprocess
import sys

import pytest
import torch

from mmlaplace.models import LaplacianFormer
from mmlaplace.ops import backend as backend_module

ARCH = dict(
    embed_dims=[8, 16, 24, 32], depths=[1] * 4, num_heads=[1, 2, 3, 4])
LOAD = """
import sys
import torch
import torch._inductor

path, images, library = sys.argv[1:]
if library:
    torch.ops.load_library(library)
image, expected = torch.load(images)
run = (torch._inductor.aoti_load_package(path)
       if path.endswith('package.pt2') else
       torch.export.load(path).module())
torch.testing.assert_close(run(image), expected, rtol=1e-4, atol=1e-5)
assert 'mmlaplace' not in sys.modules
"""


@pytest.fixture
def model():
    return LaplacianFormer(
        ARCH, stem_channels=4, out_indices=(0, 1, 2, 3), drop_path_rate=0.0)


@pytest.fixture
def small():
    """One block, whose landmarks are fewer than its keys."""
    arch = dict(embed_dims=[8], depths=[1], num_heads=[2])
    return LaplacianFormer(arch, stem_channels=4, out_indices=(0, )).eval()


def export(model):
    return torch.export.export(
        model, (torch.randn(1, 3, 64, 96), ), strict=False)


def check_in_new_process(path, model, backend):
    """The file needs the binary of the native operators, and no mmlaplace."""
    image = 5 * torch.randn(1, 3, 64, 96) + 2
    images = path.with_name('images.pt')
    with torch.no_grad():
        torch.save((image, model(image)), images)
    library = (
        backend_module.status()['binary'] if backend == 'native' else '')
    done = subprocess.run([sys.executable, '-c', LOAD, path, images, library],
                          cwd=path.parent,
                          stderr=subprocess.PIPE,
                          text=True)
    assert done.returncode == 0, done.stderr


def test_trace_holds_for_another_image(model):
    """Nothing in forward depends on values."""
    model.eval()
    traced = torch.jit.trace(model, torch.randn(1, 3, 64, 96))
    image = 5 * torch.randn(1, 3, 64, 96) + 2
    torch.testing.assert_close(traced(image), model(image))
    # Of torch's own operators, it loads where mmlaplace is not.
    assert 'mmlaplace::' not in str(traced.inlined_graph)


def test_export(model):
    model.eval()
    program = export(model)
    image = 5 * torch.randn(1, 3, 64, 96) + 2
    torch.testing.assert_close(program.module()(image), model(image))


@pytest.mark.skipif(
    '2.5' <= torch.__version__ < '2.8',
    reason='torch 2.6 does not load operators of several outputs')
def test_saved_program(small, backend, tmp_path):
    program = export(small)
    torch.export.save(program, tmp_path / 'program.pt2')
    check_in_new_process(tmp_path / 'program.pt2', small, backend)


@pytest.mark.skipif(
    torch.__version__ < '2.8', reason='such packages fail with torch 2.6')
def test_aot_inductor_package(small, native, tmp_path):
    with torch.no_grad():
        program = export(small)
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / 'package.pt2'))
    check_in_new_process(tmp_path / 'package.pt2', small, 'native')


@pytest.mark.skipif(
    torch.__version__ < '2.8', reason='mmcv has a graph break with torch 2.6')
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
