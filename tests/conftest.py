import os
import subprocess
import sys

import pytest
import torch

from mmlaplace.ops import backend as backend_module

# Refuses operators without a deterministic form and fills memory that is
# handed out uninitialized with NaN.
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def native():
    """For tests of the native operators: skips where there are none."""
    if not backend_module.use_native('cpu'):
        pytest.skip('no native operators: '
                    + backend_module.status()['problems']['cpu'])


@pytest.fixture(params=['native', 'reference'])
def backend(request, monkeypatch):
    """Runs a test once natively and once in plain torch."""
    if request.param == 'native':
        request.getfixturevalue('native')
    else:
        monkeypatch.setattr(backend_module, '_decisions', {'cpu': False})
    return request.param


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
