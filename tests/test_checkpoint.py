import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from mmlaplace.checkpoint import allow_mmengine_checkpoints


def history():
    buffer = HistoryBuffer()
    for value in (3, 0.5, 2.5):
        buffer.update(value)
    return buffer


def test_training_history_is_read_back(tmp_path):
    allow_mmengine_checkpoints()
    path = tmp_path / 'epoch_1.pth'
    # mmdet's metrics are numpy scalars.
    best = np.float64(0.5), np.float32(0.25), np.int64(3)
    torch.save(
        dict(
            message_hub=dict(
                log_scalars=dict(loss=history()),
                runtime_info=dict(best_score=best))), path)
    loaded = torch.load(path, weights_only=True)
    assert loaded['message_hub']['runtime_info']['best_score'] == best
    buffer = loaded['message_hub']['log_scalars']['loss']
    assert isinstance(buffer, HistoryBuffer)
    assert buffer.data[0].tolist() == [3, 0.5, 2.5]
    assert buffer.statistics('mean') == 2
    assert buffer.statistics('min') == 0.5


@pytest.mark.skipif(
    torch.__version__ < (2, 6), reason='torch.load is not safe by default')
def test_building_a_model_is_enough(tmp_path):
    """What mmdet's inference API does: build, then load."""
    path = tmp_path / 'epoch_1.pth'
    torch.save(dict(loss=history()), path)
    load = f'import torch; torch.load({str(path)!r})'
    build = ('from mmengine.registry import MODELS; '
             "MODELS.build(dict(type='mmlaplace.LaplacianFormer')); ")
    assert subprocess.run([sys.executable, '-c', load],
                          capture_output=True).returncode != 0
    subprocess.run([sys.executable, '-c', build + load], check=True)


class Call:
    """Pickles as a call of a function, as a hostile file would."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('content', [
    Call(os.system, 'touch HACKED'),
    Call(getattr, getattr, '__self__'),
    Call(getattr, HistoryBuffer, '__init__'),
    Call(getattr, HistoryBuffer, 'update'),
    Call(getattr, torch.Tensor, 'numpy'),
    Call(eval, '1'),
], ids=['system', 'builtins', 'init', 'update', 'torch', 'eval'])
def test_hostile_files_run_nothing(tmp_path, monkeypatch, content):
    allow_mmengine_checkpoints()
    monkeypatch.chdir(tmp_path)
    torch.save(content, 'epoch_1.pth')
    with pytest.raises(pickle.UnpicklingError):
        torch.load('epoch_1.pth', weights_only=True)
    assert not os.path.exists('HACKED')
