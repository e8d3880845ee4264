"""The study of solver and damping, on real digits."""
import runpy
import sys
from pathlib import Path

import pytest

from mmlaplace.ops.backend import use_native

pytest.importorskip('sklearn')
pytest.importorskip('mmpretrain')
pytest.importorskip('rich')

ROOT = Path(__file__).resolve().parent.parent


def test_errors_fall_with_iterations(tmp_path, monkeypatch, capsys):
    from mmlaplace.datasets import write_classification_set
    write_classification_set(tmp_path)
    monkeypatch.setattr(sys, 'argv', [
        'study_solver.py',
        str(ROOT / 'configs/quickstart/laplacianformer-nano_digits.py'),
        '--num-images', '2', '--eps', '0.01', '--num-iters', '5', '30',
        '--cfg-options', f'val_dataloader.dataset.data_root={tmp_path}',
        'val_dataloader.dataset.pipeline.1.scale=(64,64)'
    ])
    runpy.run_path(str(ROOT / 'tools/study_solver.py'), run_name='__main__')
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith('2 layers') for line in lines)
    head, _, *rows = [
        [cell.strip() for cell in line.strip('| ').split('|')]
        for line in lines if line.startswith('|')
    ]
    few, many = (dict(zip(head, map(float, row))) for row in rows)
    assert (few['iters'], many['iters']) == (5, 30)
    assert few['condition'] == many['condition'] > 100
    assert few['kernel'] == many['kernel'] > 0.01
    # Plain torch has its moments in float32, the native operators in float64.
    output = 1e-5 if use_native('cpu') else 1e-4
    for name, largest in dict(
            residual=1e-3, inverse=1e-4, output=output,
            gradient=1e-3).items():
        assert many[name] < largest
        assert few[name] > 100 * many[name]
