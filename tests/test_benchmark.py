"""The benchmark of models as users run it, at tiny sizes."""
import json
import math
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mmlaplace import cli
from mmlaplace.flops import count

pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / 'tools/benchmark.py'
CLASSIFIER = ROOT / 'configs/quickstart/laplacianformer-nano_digits.py'
DETECTOR = (
    ROOT / 'configs/quickstart/retinanet_laplacianformer-nano_fpn_digits.py')
RIVALS = dict(
    timm=('timm:resnet18', 'timm'),
    performer_pytorch=('layer:performer', 'performer-pytorch'),
    nystrom_attention=('layer:nystrom', 'nystrom-attention'))


def run(*arguments, path):
    """Run the tool; return what it printed and the document it wrote."""
    process = subprocess.run(
        [sys.executable, TOOL, '--rounds', '2', '--json', path, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(
            os.environ, OMP_NUM_THREADS='1', MMLAPLACE_BACKEND='reference'))
    assert process.returncode == 0, process.stdout + process.stderr
    document = json.loads(path.read_text())
    assert document['environment']['torch'] == torch.__version__
    assert document['environment']['backend'] == 'reference'
    return process.stdout, document


def check_figures(row):
    assert 'failure' not in row
    assert len(row['seconds']) == 2
    assert min(row['seconds']) <= row['median'] <= max(row['seconds'])
    assert 0 < row['median'] < math.inf
    assert row['extra_bytes'] >= 0


def test_training_step(tmp_path):
    ours = 'laplacianformer:tiny(norm_eval=True)'
    rival = 'mmdet:ResNet(depth=18)'
    picture = tmp_path / 'x.png'
    output, document = run(
        ours,
        rival,
        CLASSIFIER,
        '--backbone-only',
        '--shape',
        '32',
        '32',
        '--train',
        '--out',
        picture,
        path=tmp_path / 'x.json')
    labels = [ours, rival, CLASSIFIER.stem]
    *forward, ours_trained, rival_trained, failed = document['rows']
    assert [row['model'] for row in forward] == labels
    for row in forward:
        assert row['direction'] == 'forward'
        check_figures(row)
    for before, row in zip(forward, (ours_trained, rival_trained)):
        assert row['direction'] == 'training step'
        check_figures(row)
        # The gradients alone take as much as the weights.
        assert row['extra_bytes'] > 0.9 * 4 * row['parameters']
        assert row['extra_bytes'] > before['extra_bytes']
    # A batch norm cannot be trained with one pixel of one image.
    assert failed['failure'].startswith('Expected more than 1 value')
    assert failed['failure'] in output
    assert 'forward, 32 x 32, batch 1' in output
    for label in labels:
        assert output.count(f'\n  {label} ') == 2
    assert picture.read_bytes().startswith(b'\x89PNG')


def test_series_of_layers(tmp_path):
    layers = ['layer:laplacian', 'layer:gaussian', 'layer:softmax']
    picture = tmp_path / 'x.png'
    output, document = run(
        *layers,
        '--shapes',
        '64',
        '32',
        '--train',
        '--batch',
        '2',
        '--out',
        picture,
        path=tmp_path / 'x.json')
    rows = document['rows']
    assert len(rows) == 12
    assert [row['shape'] for row in rows] == [[32, 32]] * 6 + [[64, 64]] * 6
    for row in rows:
        check_figures(row)
        assert row['batch'] == 2
        assert row['macs'] > row['shape'][0]**2 // 16 * 4 * 64**2
    for direction in ('forward', 'training step'):
        assert f'\n{direction}, time per pixel over that at the' in output
    assert picture.read_bytes().startswith(b'\x89PNG')


def test_detector(tmp_path):
    output, document = run(
        DETECTOR,
        'mmpretrain::resnet/resnet18_8xb32_in1k.py',
        '--shape',
        '64',
        '96',
        '--dtype',
        'bfloat16',
        '--channels-last',
        path=tmp_path / 'x.json')
    assert document['environment']['dtype'] == 'bfloat16'
    detector, classifier = document['rows']
    check_figures(detector)
    check_figures(classifier)
    counts = count(cli.load_config(str(DETECTOR)), (64, 96))
    assert detector['parameters'] == counts['parameters']
    assert detector['macs'] == counts['total']
    assert classifier['parameters'] == 11689512


@pytest.mark.parametrize('module', RIVALS)
def test_rival(tmp_path, module):
    if find_spec(module) is None:
        pytest.skip(f'{module} is not installed')
    _, document = run(
        'layer:laplacian',
        RIVALS[module][0],
        '--shape',
        '32',
        '32',
        path=tmp_path / 'x.json')
    for row in document['rows']:
        check_figures(row)
        assert row['macs'] > 0


@pytest.fixture
def error(monkeypatch, capsys):
    """Runs the tool, which has to fail; returns its only line of error."""

    def run_in_process(*arguments):
        monkeypatch.setattr(sys, 'argv', [str(TOOL), *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(TOOL), run_name='__main__')
        assert stop.value.code == 2
        errors = capsys.readouterr().err.splitlines()
        line, = [x for x in errors if 'error: ' in x]
        return line

    return run_in_process


@pytest.mark.parametrize('module', RIVALS)
def test_missing_rival(monkeypatch, error, module):
    monkeypatch.setitem(sys.modules, module, None)
    model, package = RIVALS[module]
    assert (f"'{model}' needs {package}: pip install {package}"
            in error(model))


@pytest.mark.parametrize('arguments, message', [
    (['no.py'], "config 'no.py' does not exist"),
    (['mmdet::no.py'], "cannot read the config 'mmdet::no.py'"),
    (['mmseg::no.py'], "must be one of ('mmdet', 'mmpretrain')"),
    (['tiny'], 'a model is CONFIG.py or KIND:NAME'),
    (['layer:linear'], 'a layer is one of laplacian, gaussian, softmax'),
    (['laplacianformer:tiny(1)'], 'options must be (name=value, ...)'),
    (['laplacianformer:tiny(scale=x)'], 'options must be (name=value, ...)'),
    (['laplacianformer:tiny(scale=0)'], 'scale must be'),
    (['laplacianformer:tiny', '--shape', '31', '64'],
     "cannot build or run 'laplacianformer:tiny' at (31, 64): images must"),
    (['mmdet:NoBackbone'], 'NoBackbone is not in the mmdet::model registry'),
    (['layer:laplacian'] * 2, "'layer:laplacian' is asked for twice"),
    ([DETECTOR, '--train'], '--train takes no whole detectors'),
    (['layer:laplacian', '--batch', '0'], '--batch must be 1 or more, got 0'),
    (['layer:laplacian', '--shapes', '0'], '--shapes must be 1 or more'),
    (['layer:laplacian', '--rounds', '0'], '--rounds must be 1 or more'),
    (['layer:laplacian', '--out', 'x.txt'], '--out must end in .png'),
])
def test_bad_arguments_end_in_one_line(error, arguments, message):
    assert message in error(*arguments)
