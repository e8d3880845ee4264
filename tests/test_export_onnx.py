"""The tool that writes ONNX files, on small models; it compares by itself."""
import runpy
import sys
from pathlib import Path

import pytest
import torch
from mmengine import Config, DefaultScope
from mmengine.registry import MODELS

pytest.importorskip('onnxscript')
onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')

pytestmark = pytest.mark.skipif(
    torch.__version__ < '2.8', reason='the tool needs torch 2.8')
ROOT = Path(__file__).resolve().parents[1]
TOOL = str(ROOT / 'tools/export_onnx.py')
CONFIGS = ROOT / 'configs/quickstart'
CLASSIFIER = CONFIGS / 'laplacianformer-nano_digits.py'
MASK_RCNN = CONFIGS / 'mask-rcnn_laplacianformer-nano_fpn_digits.py'
RETINANET = CONFIGS / 'retinanet_laplacianformer-nano_fpn_digits.py'
SMALL = [
    '--cfg-options', 'model.backbone.arch.depths=[1,1,1,1]',
    'model.backbone.num_iters=2'
]


@pytest.fixture
def run(monkeypatch):
    """Runs the tool in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, 'argv', ['tool', *map(str, arguments)])
        runpy.run_path(TOOL, run_name='__main__')

    return run


@pytest.fixture
def error(run, capsys):
    """Runs the tool, which has to fail; returns its only line of error."""

    def error(*arguments):
        with pytest.raises(SystemExit) as stop:
            run(*arguments)
        assert stop.value.code == 2
        line, = [
            x for x in capsys.readouterr().err.splitlines()
            if x.startswith('error: ')
        ]
        return line

    return error


def build(config, scope):
    with DefaultScope.overwrite_default_scope(scope):
        return MODELS.build(config.model)


def shapes(path):
    """The shapes of inputs and outputs by name."""
    session = onnxruntime.InferenceSession(path)
    return {
        x.name: x.shape
        for x in (*session.get_inputs(), *session.get_outputs())
    }


def infer(path, images):
    return onnxruntime.InferenceSession(path).run(
        None, {'images': images.numpy()})


def test_classifier_with_checkpoint(run, error, capsys, monkeypatch, tmp_path):
    path, checkpoint = tmp_path / 'new/model.onnx', tmp_path / 'model.pth'
    config = Config.fromfile(CLASSIFIER)
    config.model.backbone.arch.depths = [1, 1, 1, 1]
    model = build(config, 'mmpretrain')
    torch.nn.init.zeros_(model.head.fc.weight)

    def save(scores):
        torch.nn.init.constant_(model.head.fc.bias, scores)
        torch.save(model.state_dict(), checkpoint)

    save(1)
    arguments = (CLASSIFIER, '--checkpoint', checkpoint, '--out', path,
                 '--shape', 64, 96, '--dynamic', 'batch', *SMALL)
    run(*arguments)
    assert 'random input of 3 x 3 x 64 x 96' in capsys.readouterr().out
    assert shapes(path) == {
        'images': ['batch', 3, 64, 96],
        'scores': ['batch', 10]
    }
    scores, = infer(path, torch.randn(5, 3, 64, 96))
    assert (scores == 1).all()
    assert list(path.parent.iterdir()) == [path], 'one file'

    # The file stays that of other weights.
    monkeypatch.setattr(torch.onnx, 'export', lambda *args, **kwargs: None)
    save(1.001)
    assert 'differs from the model' in error(*arguments)


def test_detector(run, tmp_path):
    path = tmp_path / 'model.onnx'
    run(MASK_RCNN, '--out', path, '--shape', 96, 128, *SMALL)
    assert shapes(path) == {
        'images': [1, 3, 96, 128],
        'level0': [1, 64, 24, 32],
        'level1': [1, 64, 12, 16],
        'level2': [1, 64, 6, 8],
        'level3': [1, 64, 3, 4],
        'level4': [1, 64, 2, 2]
    }


@pytest.mark.parametrize('path', [MASK_RCNN, RETINANET])
def test_part_of_detectors(path):
    model = build(Config.fromfile(path), 'mmdet')
    find_part = runpy.run_path(TOOL)['find_part']
    assert list(find_part(model, False)) == [model.backbone, model.neck]


def test_backbone_with_random_weights(run, monkeypatch, tmp_path):
    path = tmp_path / 'model.onnx'
    arguments = (RETINANET, '--backbone', '--out', path, '--shape', 70, 40,
                 *SMALL)
    run(*arguments)
    assert shapes(path) == {
        'images': [1, 3, 70, 40],
        'level0': [1, 64, 9, 5],
        'level1': [1, 128, 5, 3],
        'level2': [1, 192, 3, 2]
    }
    # onnxruntime adds up a large map in a single float32 for such a node.
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert 'InstanceNormalization' not in operators
    # The weights are the same each time, so the file equals the next model.
    monkeypatch.setattr(torch.onnx, 'export', lambda *args, **kwargs: None)
    run(*arguments)


def test_dynamic_size(run, capsys, tmp_path):
    path = tmp_path / 'model.onnx'
    # Two stages, for exporting takes long.
    run(CLASSIFIER, '--backbone', '--out', path, '--shape', 64, 60,
        '--dynamic', 'size', '--cfg-options',
        'model.backbone.arch.embed_dims=[16,32]',
        'model.backbone.arch.depths=[1,1]',
        'model.backbone.arch.num_heads=[2,2]',
        'model.backbone.out_indices=(1,)', 'model.backbone.num_iters=2')
    assert 'random input of 1 x 3 x 101 x 78' in capsys.readouterr().out
    assert list(shapes(path)) == ['images', 'level0']
    level, = infer(path, torch.randn(1, 3, 57, 90))
    assert level.shape == (1, 32, 8, 12)


def test_what_onnx_lacks_is_an_error(error, tmp_path):
    line = error(CLASSIFIER, '--backbone', '--out', tmp_path / 'model.onnx',
                 *SMALL, 'model.backbone.solver=exact')
    assert 'cannot export' in line and 'linalg_solve' in line


@pytest.mark.parametrize('options, complaint', [
    (['--shape', 31, 64], '--shape must be 32 x 32 or more, got 31 x 64'),
    (['--shape', 225, 224, '--dynamic', 'size'],
     '--shape must be 225 x 225 or more, got 225 x 224'),
    (['--shape', 112, 192, '--dynamic', 'size', '--cfg-options',
      'model.backbone.landmark_grid=[3,6]'],
     '--shape must be 97 x 193 or more, got 112 x 192'),
    (['--shape', 31, 64, '--dynamic', 'size', '--cfg-options',
      'model.backbone.kernel=softmax'],
     '--shape must be 32 x 32 or more, got 31 x 64'),
    (['--dynamic', 'size', '--cfg-options', 'model.backbone.landmark_ratio=8'],
     '--dynamic size needs landmark_grid, got landmark_ratio 8'),
    (['--checkpoint', 'no.pth'], "cannot read checkpoint 'no.pth'"),
], ids=['small', 'small-dynamic', 'grid', 'softmax', 'ratio', 'checkpoint'])
def test_bad_arguments_end_in_one_line(error, options, complaint):
    assert complaint in error(CLASSIFIER, *options)


def test_other_backbones_are_refused(error, tmp_path):
    config = tmp_path / 'config.py'
    config.write_text("""
default_scope = 'mmpretrain'
model = dict(type='ImageClassifier', backbone=dict(type='ResNet', depth=18))
""")
    assert 'must be LaplacianFormer, got ResNet' in error(config)


def test_missing_package_is_told(error, monkeypatch):
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    assert "pip install 'mmlaplace[export]'" in error(CLASSIFIER)
