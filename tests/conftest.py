import pytest
import torch

# Refuses operators without a deterministic form and fills memory that is
# handed out uninitialized with NaN.
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
