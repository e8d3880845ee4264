"""The tools as users run them, on small sets of real digits."""
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmlaplace.checkpoint import allow_mmengine_checkpoints

pytest.importorskip('sklearn')
pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')

ROOT = Path(__file__).resolve().parent.parent
CLASSIFIER = ROOT / 'configs/quickstart/laplacianformer-nano_digits.py'
DETECTOR = (
    ROOT / 'configs/quickstart/mask-rcnn_laplacianformer-nano_fpn_digits.py')
allow_mmengine_checkpoints()
FAST = ['default_hooks.logger.interval=2']


def start(tool, *arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, ROOT / 'tools' / tool, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS='1'),
        **kwargs)


def run(tool, *arguments):
    """Run a tool that has to succeed; return what it printed."""
    process = start(tool, *arguments)
    output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    return output + errors


@pytest.fixture
def error(monkeypatch, capsys):
    """Runs a tool that has to fail; returns its only line of error."""

    def run_in_process(tool, *arguments):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / 'tools' / tool), run_name='__main__')
        assert stop.value.code == 2
        errors = capsys.readouterr().err.splitlines()
        line, = [x for x in errors if x.startswith('error: ')]
        return line

    return run_in_process


def epochs_logged(work_dir):
    """The epochs of all runs in a work directory, in order of time."""
    lines = []
    for log in sorted(work_dir.glob('*/vis_data/scalars.json')):
        lines += map(json.loads, log.read_text().splitlines())
    return [x['epoch'] for x in lines if 'loss' in x]


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


@pytest.fixture(scope='module')
def classifier_options(digits):
    root = digits / 'classification'
    return [
        f'train_dataloader.dataset.data_root={root}',
        f'val_dataloader.dataset.data_root={root}',
        f'test_dataloader.dataset.data_root={root}',
        'train_dataloader.batch_size=256', *FAST
    ]


@pytest.fixture(scope='module')
def detector_options(digits):
    root = digits / 'detection'
    ann_file = root / 'annotations/instances_val.json'
    return [
        f'train_dataloader.dataset.data_root={root}',
        f'val_dataloader.dataset.data_root={root}',
        f'test_dataloader.dataset.data_root={root}',
        f'val_evaluator.ann_file={ann_file}',
        f'test_evaluator.ann_file={ann_file}', 'train_cfg.max_epochs=1', *FAST
    ]


@pytest.fixture(scope='module')
def classifier(classifier_options, tmp_path_factory):
    """A work directory with one epoch trained."""
    work_dir = tmp_path_factory.mktemp('classifier')
    run('train.py', CLASSIFIER, '--work-dir', work_dir, '--cfg-options',
        'train_cfg.max_epochs=1', *classifier_options)
    return work_dir


@pytest.fixture(scope='module')
def detector(detector_options, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp('detector')
    run('train.py', DETECTOR, '--work-dir', work_dir, '--auto-scale-lr',
        '--cfg-options', *detector_options)
    return work_dir


def test_resume_goes_on_with_the_next_epoch(classifier, classifier_options):
    output = run('train.py', CLASSIFIER, '--work-dir', classifier, '--resume',
                 '--cfg-options', 'train_cfg.max_epochs=2',
                 *classifier_options)
    assert 'resumed epoch: 1' in output
    assert sorted(set(epochs_logged(classifier))) == [1, 2]
    checkpoint = torch.load(classifier / 'epoch_2.pth', weights_only=True)
    assert checkpoint['meta']['epoch'] == 2


@pytest.mark.parametrize('tta', [False, True])
def test_classifier_evaluation(classifier, classifier_options, tmp_path, tta):
    out, pictures = tmp_path / 'out.pkl', tmp_path / 'pictures'
    option = ['--tta'] if tta else ['--show-dir', pictures]
    output = run('test.py', CLASSIFIER, classifier / 'epoch_1.pth',
                 '--work-dir', tmp_path, '--out', out, *option,
                 '--cfg-options', *classifier_options)
    assert 'accuracy/top1' in output
    assert len(pickle.loads(out.read_bytes())) == 359
    assert tta or len(list(pictures.rglob('*.png'))) == 359


@pytest.mark.parametrize('tta', [False, True])
def test_detector_evaluation(detector, detector_options, tmp_path, tta):
    out, pictures = tmp_path / 'out.pkl', tmp_path / 'pictures'
    options = list(detector_options)
    if tta:  # mmdet averages boxes alone
        options += [
            'test_evaluator.metric=bbox', 'model.roi_head.mask_head=None'
        ]
    output = run('test.py', DETECTOR, detector / 'epoch_1.pth', '--work-dir',
                 tmp_path, '--out', out, '--show-dir', pictures,
                 *['--tta'] * tta, '--cfg-options', *options)
    assert 'coco/bbox_mAP_50' in output
    assert len(pickle.loads(out.read_bytes())) == 4
    assert len(list(pictures.rglob('*.jpg'))) == 4


def test_mmpretrain_inference(classifier, digits):
    """In a fresh process, which has not imported mmlaplace."""
    image = next((digits / 'classification/val/3').iterdir())
    code = f"""
from mmpretrain import ImageClassificationInferencer, inference_model
inferencer = ImageClassificationInferencer(
    {str(CLASSIFIER)!r}, pretrained={str(classifier / 'epoch_1.pth')!r})
result, = inferencer({str(image)!r})
assert result['pred_class'] in '0123456789'
assert len(result['pred_scores']) == 10
"""
    subprocess.run([sys.executable, '-c', code], check=True)


def test_mmdet_inference(detector, digits):
    image = next((digits / 'detection/val').iterdir())
    code = f"""
from mmdet.apis import DetInferencer, inference_detector, init_detector
config = {str(DETECTOR)!r}
checkpoint = {str(detector / 'epoch_1.pth')!r}
image = {str(image)!r}
prediction, = DetInferencer(config, checkpoint, device='cpu')(
    image)['predictions']
model = init_detector(config, checkpoint, device='cpu')
assert model.dataset_meta['classes'] == tuple('0123456789')
instances = inference_detector(model, image).pred_instances
assert len(prediction['bboxes']) == len(instances.bboxes)
assert instances.masks.shape[1:] in ((96, 72), (72, 96))
"""
    subprocess.run([sys.executable, '-c', code], check=True)


def test_image_demo(classifier, detector, digits, tmp_path):
    for config, work_dir, image in (
        (CLASSIFIER, classifier,
         next((digits / 'classification/val/3').iterdir())),
        (DETECTOR, detector, next((digits / 'detection/val').iterdir()))):
        out_dir = tmp_path / config.stem
        output = run('image_demo.py', config, work_dir / 'epoch_1.pth', image,
                     '--out-dir', out_dir)
        assert str(image) in output
        assert [x.stem for x in out_dir.rglob('*.*')] == [image.stem]


def test_bad_arguments_end_in_one_line(error, classifier, classifier_options,
                                       tmp_path):
    checkpoint = classifier / 'epoch_1.pth'
    options = ['--work-dir', tmp_path, '--cfg-options', *classifier_options]
    assert "config 'no.py' does not exist" in error('train.py', 'no.py')
    assert 'train_dataloader.dataset.data_root, does not exist' in error(
        'train.py', CLASSIFIER, *options,
        'train_dataloader.dataset.data_root=nowhere')
    assert "checkpoint 'no.pth' does not exist" in error(
        'test.py', CLASSIFIER, 'no.pth', *options)
    assert "checkpoint 'no.pth' of --resume does not exist" in error(
        'train.py', CLASSIFIER, '--resume', 'no.pth', *options)
    assert '--amp needs optim_wrapper.type to be OptimWrapper' in error(
        'train.py', CLASSIFIER, '--amp', '--cfg-options',
        'optim_wrapper.type=ApexOptimWrapper')
    assert "'no.pth', from load_from, does not exist" in error(
        'train.py', CLASSIFIER, *options, 'load_from=no.pth')
    assert "'no.pth', from model.backbone.init_cfg.checkpoint" in error(
        'train.py', CLASSIFIER, *options,
        'model.backbone.init_cfg.type=Pretrained',
        'model.backbone.init_cfg.checkpoint=no.pth')
    assert '--tta is for boxes alone' in error('test.py', DETECTOR,
                                               checkpoint, '--tta')
    assert 'no pictures with --tta' in error('test.py', CLASSIFIER,
                                             checkpoint, '--tta',
                                             '--show-dir', tmp_path)
    assert "--out must end in .pkl or .pickle, got 'x.txt'" in error(
        'test.py', CLASSIFIER, checkpoint, '--out', 'x.txt', *options)
    other_arch = 'model.backbone.arch.embed_dims=[16,64,128,192]'
    for tool, given in (('test.py', [checkpoint]),
                        ('train.py', ['--resume', checkpoint])):
        line = error(tool, CLASSIFIER, *given, *options, other_arch)
        assert 'is not of the model in the config' in line
        assert 'has shape (32' in line and 'not (16' in line
    broken = tmp_path / 'broken.pth'
    broken.write_bytes(checkpoint.read_bytes()[:5000])
    assert 'cannot read checkpoint' in error('test.py', CLASSIFIER, broken,
                                             *options)
    config = tmp_path / 'other.py'
    config.write_text("default_scope = 'mmseg'")
    assert "must be one of ('mmdet', 'mmpretrain'), got 'mmseg'" in error(
        'train.py', config)
    config.write_text("default_scope = 'mmdet'")
    assert '--auto-scale-lr needs auto_scale_lr.base_batch_size' in error(
        'train.py', config, '--auto-scale-lr')
