"""Mixed precision on the CPU."""
import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mmlaplace.optim import CPUAmpOptimWrapper


class Model(BaseModel):
    """Notes the dtype in which its layer computes."""

    def __init__(self, several):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.several = several

    def extract_feat(self, x):
        features = self.layer(x)
        self.dtype = features.dtype
        return (features, features) if self.several else features

    def forward(self, x, mode='loss'):
        features = self.extract_feat(x)
        for part in features if self.several else [features]:
            assert part.dtype == torch.float32
            # What heads compute is not rounded to bfloat16.
            assert self.layer(part).dtype == torch.float32
        return dict(loss=sum(part.sum() for part in features))


@pytest.mark.parametrize('several', [False, True])
def test_features_are_computed_in_bfloat16(several):
    """And given in float32; outside of training nothing is."""
    model = Model(several)
    wrapper = CPUAmpOptimWrapper(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        model.train_step([torch.randn(2, 4)], wrapper)
        assert model.dtype == torch.bfloat16
        model(torch.randn(2, 4))
        assert model.dtype == torch.float32
    with pytest.raises(RuntimeError):
        model.train_step([torch.randn(2, 5)], wrapper)
    model(torch.randn(2, 4))
    assert model.dtype == torch.float32
