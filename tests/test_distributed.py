"""Training in two processes on one machine, as dist_train.sh starts it."""
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine import Config
from mmengine.registry import MODELS, DefaultScope

from mmlaplace.checkpoint import allow_mmengine_checkpoints

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / 'configs' / 'quickstart'


def free_port():
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        return server.getsockname()[1]


# Two steps each: the second finds the parameters that the first left unused.
TRAIN_ALL_VARIANTS = """
import itertools
import torch
from torch.nn.parallel import DistributedDataParallel
from mmlaplace.models import LaplacianFormer

torch.distributed.init_process_group('gloo')
arch = dict(embed_dims=[4] * 4, depths=[1] * 4, num_heads=[1] * 4)
subsets = [
    subset for size in range(1, 5)
    for subset in itertools.combinations(range(4), size)
]
trained = 0
for out_indices, frozen in itertools.product(subsets, range(-1, 5)):
    model = LaplacianFormer(
        arch,
        out_indices=out_indices,
        frozen_stages=frozen,
        stem_channels=2).train()
    if not any(p.requires_grad for p in model.parameters()):
        continue
    model = DistributedDataParallel(model, find_unused_parameters=False)
    for _ in range(2):
        outputs = model(torch.randn(2, 3, 64, 64))
        sum(x.square().mean() for x in outputs).backward()
    trained += 1
if torch.distributed.get_rank() == 0:
    print('trained', trained)
"""


def launch(*command, **variables):
    """Run a command that has to succeed; return what it printed."""
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS='1', PATH=path, **variables))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_variant_has_unused_parameters(tmp_path):
    script = tmp_path / 'train.py'
    script.write_text(TRAIN_ALL_VARIANTS)
    output = launch(sys.executable, '-m', 'torch.distributed.run',
                    '--nproc-per-node', 2, '--master-port', free_port(),
                    script)
    # All but those with every built stage frozen.
    assert output.split() == ['trained', str(15 * 6 - 26)]


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    pytest.importorskip('sklearn')
    from mmlaplace.datasets import (
        write_classification_set,
        write_detection_set,
    )
    root = tmp_path_factory.mktemp('digits')
    write_classification_set(root / 'classification')
    write_detection_set(root / 'detection', num_train=40, num_val=1, size=96)
    return root


def train(work_dir, config, options, processes):
    """Train without validation; return weights and the iterations done."""
    options = ['--work-dir', work_dir, '--cfg-options', *options,
               'val_dataloader=None', 'val_evaluator=None', 'val_cfg=None']
    if processes == 1:
        command = [sys.executable, ROOT / 'tools/train.py', config]
    else:
        command = ['bash', ROOT / 'tools/dist_train.sh', config, processes]
    launch(*command, *options, PORT=str(free_port()))
    allow_mmengine_checkpoints()
    checkpoint = torch.load(work_dir / 'epoch_1.pth', weights_only=True)
    return checkpoint['state_dict'], checkpoint['meta']['iter']


def assert_same_training(one, two, iterations):
    (weights, done), (other_weights, other_done) = one, two
    assert done == other_done == iterations
    torch.testing.assert_close(weights, other_weights, rtol=1e-4, atol=1e-5)
    # They did learn.
    assert (weights['backbone.norm3.weight'] - 1).abs().max() > 1e-5


# Python 3.11 hangs, once in a great while, where a process with gloo's threads
# forks: a thread that ends at that moment takes a lock along.
def without_workers(loader):
    return [f'{loader}.num_workers=0', f'{loader}.persistent_workers=False']


# SGD, since AdamW's first steps are the signs of gradients: where one is near
# zero, rounding turns it.
COMMON = [
    *without_workers('train_dataloader'),
    'optim_wrapper.optimizer.type=SGD', 'optim_wrapper.optimizer.lr=0.001',
    'train_cfg.max_epochs=1', 'model.backbone.norm_eval=True',
    'find_unused_parameters=False', 'param_scheduler=None'
]


def test_classifier_trains_as_in_one_process(digits, tmp_path):
    """The same global batch; batch norms keep their statistics."""
    pytest.importorskip('mmpretrain')
    common = [
        *COMMON,
        f'train_dataloader.dataset.data_root={digits / "classification"}',
        'train_dataloader.dataset.pipeline.1.crop_ratio_range=(1,1)',
        'train_dataloader.dataset.pipeline.1.aspect_ratio_range=(1,1)'
    ]
    runs = [
        train(tmp_path / str(processes),
              QUICKSTART / 'laplacianformer-nano_digits.py',
              [*common, f'train_dataloader.batch_size={72 // processes}'],
              processes) for processes in (1, 2)
    ]
    assert_same_training(*runs, iterations=20)


def test_two_processes_evaluate_every_image_once(digits, tmp_path):
    pytest.importorskip('mmpretrain')
    config = QUICKSTART / 'laplacianformer-nano_digits.py'
    cfg = Config.fromfile(config)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(cfg.model)
    # A bias that decides makes the accuracy the share of that class.
    torch.nn.init.zeros_(model.head.fc.weight)
    torch.nn.init.constant_(model.head.fc.bias[3], 1.0)
    checkpoint = tmp_path / 'biased.pth'
    torch.save(dict(state_dict=model.state_dict()), checkpoint)
    root = digits / 'classification'
    output = launch(
        'bash', ROOT / 'tools/dist_test.sh', config, checkpoint, 2,
        '--work-dir', tmp_path, '--cfg-options',
        *without_workers('test_dataloader'),
        f'test_dataloader.dataset.data_root={root}', PORT=str(free_port()))
    images = list(root.glob('val/*/*.png'))
    threes = sum(path.parent.name == '3' for path in images)
    assert f'accuracy/top1: {100 * threes / len(images):.4f}' in output


def test_detector_trains_as_in_one_process(digits, tmp_path):
    """mmdet divides losses by the samples of a process, so that two processes
    are one that adds up the gradients of two batches; samplers take all."""
    pytest.importorskip('mmdet')
    common = [
        *COMMON,
        f'train_dataloader.dataset.data_root={digits / "detection"}',
        'train_dataloader.batch_size=1',
        'train_dataloader.batch_sampler=None',
        'model.train_cfg.rpn.sampler.num=100000',
        'model.train_cfg.rcnn.sampler.num=100000',
        'model.train_cfg.rcnn.sampler.pos_fraction=1.0',
    ]
    runs = [
        train(tmp_path / str(processes),
              QUICKSTART / 'mask-rcnn_laplacianformer-nano_fpn_digits.py',
              [*common, f'optim_wrapper.accumulative_counts={2 // processes}'],
              processes) for processes in (1, 2)
    ]
    (one, one_done), (two, two_done) = runs
    assert_same_training((one, one_done // 2), (two, two_done), iterations=20)
