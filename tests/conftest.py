import functools
import os
import shutil
import subprocess
import sys

import pytest
import torch

from mmlaplace.ops import backend as backend_module
from mmlaplace.ops import build

# Refuses operators without a deterministic form and fills memory that is
# handed out uninitialized with NaN.
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)

# The op tests run on this device too, see tools/check_cuda.sh.
DEVICE = os.environ.get('MMLAPLACE_TEST_DEVICE', 'cpu')
if DEVICE != 'cpu':
    torch.set_default_device(DEVICE)


@functools.lru_cache(None)
def missing_for_compiling():
    try:
        build.check_machine(build.source_folder(), 'cpu')
    except build.BuildError as error:
        return str(error)
    ninja = shutil.which('ninja', path=build.search_path())
    return '' if ninja else 'no ninja'


def pytest_configure(config):
    config.addinivalue_line(
        'markers', 'needs_compiler: skipped where operators do not compile')


def pytest_runtest_setup(item):
    if item.get_closest_marker('needs_compiler') and missing_for_compiling():
        pytest.skip(missing_for_compiling())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def native():
    """For tests of the native operators: skips where there are none."""
    if not backend_module.use_native(DEVICE):
        pytest.skip('no native operators: '
                    + backend_module.status()['problems'][DEVICE])


@pytest.fixture(params=['native', 'reference'])
def backend(request, monkeypatch):
    """Runs a test once natively and once in plain torch."""
    if request.param == 'native':
        request.getfixturevalue('native')
    else:
        monkeypatch.setattr(backend_module, '_decisions', {DEVICE: False})
    return request.param


def _in_nan(tensor):
    """A copy amid NaN, with which an overrun would be seen."""
    frame = torch.full([side + 2 for side in tensor.shape], torch.nan,
                       dtype=tensor.dtype)
    inside = frame[tuple(slice(1, -1) for _ in tensor.shape)]
    return inside.copy_(tensor)


_LAYOUTS = {
    'amid NaN': _in_nan,
    'transposed': lambda x: x.mT.contiguous().mT,
    'batch transposed': lambda x: x.transpose(0, 1).contiguous().transpose(
        0, 1),
    'one in two': lambda x: x.repeat_interleave(2, -1)[..., ::2],
    'one in three rows': lambda x: x.repeat_interleave(3, -2)[..., ::3, :],
    'expanded batch': lambda x: x[:, :1].expand_as(x),
    'expanded rows': lambda x: x[..., :1, :].expand_as(x),
    'expanded columns': lambda x: x[..., :1].expand_as(x),
}


@pytest.fixture(params=_LAYOUTS)
def layout(request):
    """Gives a function that lays a tensor (a, b, n, m) out otherwise."""
    return _LAYOUTS[request.param]


@pytest.fixture
def set_num_threads():
    """For tests of several numbers of threads, see below."""
    return torch.set_num_threads


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs tests that set the number of threads in their own processes.

    After torch.set_num_threads(2), torch 2.11 inverts a batch of 196 x 196
    matrices to garbage (its LAPACK complains of DLASWP), and so would the
    tests that come later.
    """
    if ('set_num_threads' not in pyfuncitem.fixturenames
            or 'MMLAPLACE_TEST_THREADS' in os.environ):
        return None
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', pyfuncitem.nodeid],
        env={**os.environ, 'MMLAPLACE_TEST_THREADS': '1'},
        cwd=pyfuncitem.config.rootpath,
        stdout=subprocess.PIPE,
        text=True)
    assert done.returncode == 0, done.stdout
    return True
