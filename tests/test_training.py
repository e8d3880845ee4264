"""Short trainings through tools/train.py: mixed precision, high rates."""
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip('sklearn')
pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')

ROOT = Path(__file__).resolve().parent.parent
CLASSIFIER = ROOT / 'configs/quickstart/laplacianformer-nano_digits.py'
DETECTOR = (
    ROOT / 'configs/quickstart/mask-rcnn_laplacianformer-nano_fpn_digits.py')


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    from mmlaplace.datasets import (
        write_classification_set,
        write_detection_set,
    )
    root = tmp_path_factory.mktemp('digits')
    write_classification_set(root / 'classification')
    write_detection_set(root / 'detection', num_train=8, num_val=4, size=96)
    return root


@pytest.fixture
def train(digits, monkeypatch, tmp_path):
    """Trains in this process; returns what was logged in each iteration."""

    def run(config, data, name, flags, options):
        work_dir = tmp_path / name
        monkeypatch.setattr(sys, 'argv', [
            'train.py',
            str(config), *flags, '--work-dir',
            str(work_dir), '--cfg-options',
            f'train_dataloader.dataset.data_root={digits / data}',
            'train_dataloader.num_workers=0',
            'train_dataloader.persistent_workers=False',
            'train_cfg.max_epochs=1',
            'val_cfg=None',
            'val_dataloader=None',
            'val_evaluator=None',
            'param_scheduler=None',
            'default_hooks.logger.interval=1',
            f'visualizer.name={work_dir}',
            *options
        ])
        runpy.run_path(str(ROOT / 'tools/train.py'), run_name='__main__')
        log, = work_dir.glob('*/vis_data/scalars.json')
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


def losses(lines):
    return torch.tensor([line['loss'] for line in lines])


@pytest.mark.skipif(
    torch.cuda.is_available(), reason='--amp is float16 where there is a GPU')
@pytest.mark.parametrize('config, data, options', [
    (CLASSIFIER, 'classification', ['train_dataloader.batch_size=128']),
    (DETECTOR, 'detection', ['train_dataloader.batch_size=4']),
], ids=['classifier', 'detector'])
def test_amp_follows_float32(train, config, data, options):
    """Close to it, and yet another training; also for a config for GPUs."""
    exact = losses(train(config, data, 'exact', [], options))
    options += [
        'optim_wrapper.type=AmpOptimWrapper',
        'optim_wrapper.loss_scale=dynamic'
    ]
    mixed = losses(train(config, data, 'mixed', ['--amp'], options))
    torch.testing.assert_close(mixed, exact, rtol=0.02, atol=0)
    assert not torch.equal(mixed, exact)


@pytest.mark.parametrize('flags', [[], ['--amp']], ids=['float32', 'amp'])
def test_ten_times_the_learning_rate(train, flags):
    """Of 30 steps, in which every matrix is inverted."""
    lines = train(CLASSIFIER, 'classification', 'high', flags, [
        'optim_wrapper.optimizer.lr=0.01', 'train_dataloader.batch_size=48',
        'default_hooks.solver_monitor.interval=1'
    ])
    assert len(lines) == 30
    assert losses(lines).isfinite().all()
    residuals = torch.tensor(
        [line['residual/backbone.stages.0'] for line in lines])
    assert 0 < residuals.max() < 0.1
