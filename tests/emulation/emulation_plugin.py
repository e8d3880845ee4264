"""Makes pytest test the emulated CUDA operators as the native ones."""
import os

import pytest
import torch

from mmlaplace.ops import backend

torch.ops.load_library(os.environ['MMLAPLACE_EMULATION'])
backend._decisions['cpu'] = True

from mmlaplace.ops import native  # noqa: E402, F401


@pytest.fixture
def far_apart(tmp_path):
    """Lays tensors out with rows far apart, in a sparse file."""

    def lay_out(tensor, stride=2**31):
        rows, columns = tensor.shape[-2:]
        count = tensor.numel() // columns
        storage = torch.from_file(
            str(tmp_path / f'{len(list(tmp_path.iterdir()))}'),
            shared=True,
            size=(count - 1) * stride + columns,
            dtype=tensor.dtype)
        flat = storage.as_strided((count, columns), (stride, 1))
        strides = [
            step // columns * stride for step in tensor.stride()[:-1]
        ]
        flat.copy_(tensor.reshape(count, columns))
        return storage.as_strided(tensor.shape, (*strides, 1))

    return lay_out
