"""The benchmark as users run it, at tiny sizes."""
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TOOL = Path(__file__).resolve().parent.parent / 'tools/benchmark_ops.py'
CONTESTANTS = dict(
    kernel=['mmlaplace', 'reference', 'cdist', 'gaussian'],
    inverse=['mmlaplace', 'reference', 'lu'],
    attention=['mmlaplace', 'reference', 'gaussian', 'sdpa'])
DIRECTIONS = ['forward', 'forward + backward']


def run(*arguments, path):
    """Run the tool; return what it printed and the rows that it wrote."""
    process = subprocess.run(
        [sys.executable, TOOL, '--quick', '--json', path, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS='1'))
    assert process.returncode == 0, process.stdout + process.stderr
    document = json.loads(path.read_text())
    assert document['environment']['torch'] == torch.__version__
    return process.stdout, document['rows']


def check_figures(rows):
    for row in rows:
        assert 'failure' not in row
        median, = row['seconds']
        assert median == row['median'] and 0 < median < math.inf
        backward = row['direction'] == 'forward + backward'
        assert (row['gradient_bytes'] > 0) == backward
        assert row['input_bytes'] > 0 and row['output_bytes'] > 0
        assert row['extra_bytes'] >= 0 and row['working_bytes'] >= 0


def test_stages(tmp_path):
    output, rows = run('--sizes', 'stages', path=tmp_path / 'x.json')
    check_figures(rows)
    for op, names in CONTESTANTS.items():
        assert f'\n{op}\n' in output
        for name in names:
            assert f'\n  {name} ' in output
            of_name = [
                row for row in rows
                if (row['op'], row['contestant']) == (op, name)
            ]
            assert [row['direction'] for row in of_name] == DIRECTIONS
    for row in rows:
        assert ('residual' in row) == (row['op'] == 'inverse')
        assert 0 < row.get('residual', 1e-5) < 1e-3


def test_scaling(tmp_path):
    picture = tmp_path / 'x.png'
    output, rows = run(
        '--sizes',
        'scaling',
        '--ops',
        'attention',
        '--out',
        picture,
        path=tmp_path / 'x.json')
    check_figures(rows)
    assert len(rows) == 16
    assert 'attention, forward: growth of time per 4 x tokens' in output
    assert picture.read_bytes().startswith(b'\x89PNG')
    for row in rows:
        # The count of the process is exact to about 0.3 MiB.
        kept = row['output_bytes'] + row['gradient_bytes']
        assert row['extra_bytes'] > kept - 2**19


@pytest.mark.needs_compiler
def test_compiled_reference(tmp_path):
    _, rows = run('--sizes', 'stages', '--ops', 'kernel', '--compile',
                  path=tmp_path / 'x.json')
    check_figures(rows)
    assert [row['contestant'] for row in rows] == 2 * [
        *CONTESTANTS['kernel'], 'compiled'
    ]


def test_limits_of_a_card():
    """Those of ops/README.md for an H200, in microseconds."""
    card = SimpleNamespace(
        multi_processor_count=132,
        clock_rate=1_980_000,
        memory_clock_rate=3_125_000,
        memory_bus_width=6144,
        major=9,
        minor=0)
    tool = runpy.run_path(str(TOOL))
    stage = (64, 2, 3136, 49, 32)
    for op, shape, forward, backward in (
            ('kernel', stage, 38, 94), ('attention', stage, 150, 490),
            ('inverse', (160, 49, 49), 5.5, 14)):
        case = tool['Case'](op, 'stages', shape)
        found = [
            1e6 * tool['find_limit'](case, both, card)
            for both in (False, True)
        ]
        assert found == pytest.approx([forward, forward + backward], rel=0.1)


@pytest.mark.parametrize('arguments, message', [
    (['--rounds', '0'], '--rounds must be 1 or more, got 0'),
    (['--out', 'x.txt'], "--out must end in .png, .pdf, .svg, got 'x.txt'"),
    (['--out', 'no/x.png'], "--out: cannot write 'no/x.png'"),
    (['--json', '.'], "--json: cannot write '.'"),
    (['--out', 'x.png', '--sizes', 'stages'], '--out draws the scaling'),
    (['--out', 'x.png', '--ops', 'inverse'], '--out draws the scaling'),
    pytest.param(['--device', 'cuda'],
                 '--device cuda needs a GPU',
                 marks=pytest.mark.skipif(
                     torch.cuda.is_available(), reason='has a GPU')),
])
def test_bad_arguments_end_in_one_line(monkeypatch, capsys, arguments,
                                       message):
    monkeypatch.setattr(sys, 'argv', [str(TOOL), *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(TOOL), run_name='__main__')
    assert stop.value.code == 2
    line, = [
        x for x in capsys.readouterr().err.splitlines() if 'error: ' in x
    ]
    assert message in line
