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
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
