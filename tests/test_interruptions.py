"""Training that is killed, fills the disk or loses a process.

``MMLAPLACE_TEST_KILLS=20 pytest -s -k random tests/test_interruptions.py``
kills the quickstart training of the classifier 20 times and prints a table.
"""
import errno
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from mmengine import Config
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, DefaultScope
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement

from mmlaplace.checkpoint import allow_mmengine_checkpoints
from mmlaplace.hooks import AtomicBackend, AtomicCheckpointHook

ROOT = Path(__file__).resolve().parent.parent
CLASSIFIER = ROOT / 'configs/quickstart/laplacianformer-nano_digits.py'
allow_mmengine_checkpoints()


class Line(BaseModel):
    """Learns that ones give zeros."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, inputs, mode='tensor'):
        if mode == 'predict':
            return [BaseDataElement()]
        return dict(loss=self.layer(torch.stack(inputs)).square().mean())


class EverBetter(BaseMetric):
    default_prefix = 'ever'

    def process(self, data_batch, data_samples):
        self.results.append(None)

    def compute_metrics(self, results):
        return dict(accuracy=time.monotonic())


def train(folder, hook, epochs):
    data = dict(
        batch_size=1,
        dataset=[dict(inputs=torch.ones(64))],
        sampler=dict(type='DefaultSampler', shuffle=False))
    Runner(
        Line(),
        str(folder),
        train_dataloader=data,
        val_dataloader=data,
        val_evaluator=[EverBetter()],
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        val_cfg=dict(),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(
            checkpoint=dict(
                type=hook, interval=1, max_keep_ckpts=1,
                save_best='ever/accuracy')),
        experiment_name=str(os.getpid()),
        log_level='ERROR',
        resume=True).train()


def train_with_fault(folder, hook, point, limit):
    """Train a second epoch, and fail where checkpoints are touched.

    Args:
        folder (Path): Work directory.
        hook (str): Type of the checkpoint hook.
        point (int): Fail at this opening, renaming or removal of a file.
        limit (int, optional): Fail after writing so many bytes, or just
            before the step if None.
    """
    steps = 0

    def watch(event, arguments):
        nonlocal steps
        writes = event == 'open' and 'w' in (arguments[1] or '')
        if not writes and event not in ('os.rename', 'os.remove'):
            return
        path = Path(os.fspath(arguments[0]))
        if path.parent == folder and path.suffix != '.py':
            steps += 1
            if steps == point and limit is None:
                os.kill(os.getpid(), signal.SIGKILL)
            elif steps == point:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    sys.addaudithook(watch)
    train(folder, hook, 2)


def fork(job, *arguments):
    """Run a function in a child; return its exit code, negative if killed."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            job(*arguments)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def last_epoch(work_dir):
    """The epoch of what ``last_checkpoint`` names, which must be intact."""
    pointer = work_dir / 'last_checkpoint'
    if not pointer.exists():
        return 0
    checkpoint = torch.load(pointer.read_text(), weights_only=True)
    for name, tensor in checkpoint['state_dict'].items():
        assert tensor.isfinite().all(), name
    return checkpoint['meta']['epoch']


def fail_everywhere(root, hook):
    """Kill a tiny run wherever it touches a file, and fill the disk.

    Every fault hits the second epoch of training in a child of this process;
    another child then resumes. Prints a line of JSON for each.
    """
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder, trained = root / 'run', root / 'trained'
    # Not in a child, for what is imported or cached by it.
    train(folder, hook, 1)
    folder.rename(trained)

    def fail(point, limit):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained, folder)
        return fork(train_with_fault, folder, hook, point, limit)

    def report(**fault):
        try:
            found = last_epoch(folder)
        except Exception:
            found = None
        resumed = fork(train, folder, hook, 2)
        print(json.dumps(dict(
            fault,
            found=found,
            resumed=resumed,
            files=sorted(x.name for x in folder.glob('*.pth*')))), flush=True)

    # Python ignores this signal, so that writes beyond the limit fail. Else
    # it kills.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    point, killed = 0, True
    while killed:
        point += 1
        for limit in (None, 7):
            killed = fail(point, limit) < 0
            if not killed:
                break
            report(point=point, limit=limit)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    report(status=fail(1, 7))


def test_no_fault_loses_the_last_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, tmp_path, 'mmlaplace.AtomicCheckpointHook'],
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES=''))
    assert done.returncode == 0, done.stderr
    *kills, full = [
        json.loads(line) for line in done.stdout.splitlines()
        if line.startswith('{')
    ]
    # At least a checkpoint, the name of it and the removal of an older one.
    assert len({fault['point'] for fault in kills}) >= 5
    for fault in kills:
        assert fault['found'] in (1, 2) and fault['resumed'] == 0, fault
        assert 'epoch_2.pth' in fault['files'], fault
        assert 'epoch_1.pth' not in fault['files'], fault
    assert full['found'] == 1 and full['status'] == 1
    assert ('OSError: [Errno 27] cannot save: File too large: '
            f"'{tmp_path}/run/epoch_2.pth'") in done.stderr


def test_full_disk_leaves_the_former_file(tmp_path, monkeypatch):

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / 'new' / 'epoch_1.pth'
    AtomicBackend().put(b'former', path)
    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(
            OSError, match='cannot save: No space left .*epoch_1.pth'):
        AtomicBackend().put(b'latter', path)
    assert path.read_bytes() == b'former'
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize('config', [
    'classification/laplacianformer-tiny_8xb128_in1k.py',
    'detection/mask-rcnn_laplacianformer-t_fpn_1x_coco.py',
    'quickstart/retinanet_laplacianformer-nano_fpn_digits.py'
])
def test_configs_have_the_hook(config):
    pytest.importorskip('mmdet')
    pytest.importorskip('mmpretrain')
    cfg = Config.fromfile(ROOT / 'configs' / config)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        hook = HOOKS.build(cfg.default_hooks.checkpoint)
    assert isinstance(hook, AtomicCheckpointHook) and hook.interval == 1


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    pytest.importorskip('sklearn')
    pytest.importorskip('mmpretrain')
    from mmlaplace.datasets import write_classification_set
    root = tmp_path_factory.mktemp('digits')
    write_classification_set(root)
    return root


# With the variable the quickstart as it is, else on few images.
FULL = 'MMLAPLACE_TEST_KILLS' in os.environ
KILLS = int(os.environ.get('MMLAPLACE_TEST_KILLS', 3))
EPOCHS, STEPS = (5, 45) if FULL else (3, 4)
FEW = [] if FULL else [
    'train_dataloader.dataset.data_prefix=val',
    'train_dataloader.batch_size=90', f'train_cfg.max_epochs={EPOCHS}',
    'train_dataloader.num_workers=0', 'val_dataloader.num_workers=0',
    'train_dataloader.persistent_workers=False',
    'val_dataloader.persistent_workers=False'
]


def start_training(digits, work_dir, log, *arguments, **variables):
    return subprocess.Popen(
        [
            sys.executable, ROOT / 'tools/train.py', CLASSIFIER, '--work-dir',
            work_dir, '--resume', 'auto', *arguments, '--cfg-options',
            f'train_dataloader.dataset.data_root={digits}',
            f'val_dataloader.dataset.data_root={digits}',
            'default_hooks.logger.interval=1', *FEW
        ],
        stdout=log.open('w'),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=dict(os.environ, OMP_NUM_THREADS='1', **variables))


def wait_for(condition, process):
    """Wait until a condition holds, or the process ends; return if it did."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.005)
    return False


def saving(work_dir, since):
    """Whether a checkpoint has been written partially since then."""
    with suppress(FileNotFoundError):
        return any(
            path.stat().st_mtime > since
            for path in work_dir.glob('*.pth.partial'))
    return False


def assert_finished(work_dir):
    assert last_epoch(work_dir) == EPOCHS
    log = max(work_dir.glob('*/vis_data/scalars.json'))
    losses = [
        scalars['loss'] for scalars in map(
            json.loads, log.read_text().splitlines()) if 'loss' in scalars
    ]
    assert all(map(math.isfinite, losses))


def stage(log, amid_saving):
    """What a process was doing when it was killed."""
    if amid_saving:
        return 'writing'
    steps = re.findall(r'Epoch\((\w+)|(Saving)', log) or [('start-up', '')]
    return ''.join(steps[-1])


def test_killed_at_random_moments(digits, tmp_path):
    rng = random.Random(0)
    work_dir, log = tmp_path / 'run', tmp_path / 'log'
    injected, finished = Counter(), 0
    while True:
        before, since = last_epoch(work_dir), time.time()
        process = start_training(digits, work_dir, log)
        if sum(injected.values()) == KILLS:
            process.wait()
        elif not injected or rng.random() < 0.5:
            saves = rng.randint(1, 2)
            wait_for(lambda: log.read_text().count('Saving') >= saves, process)
            # Or the next one, where this one was over too soon.
            wait_for(
                lambda: saving(work_dir, since) or log.read_text().count(
                    'Saving') > saves, process)
        else:
            steps = rng.randint(0, 2 * STEPS)
            wait_for(lambda: log.read_text().count('Epoch(') >= steps, process)
            time.sleep(rng.uniform(0, 0.1))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status, text = process.wait(), log.read_text()
        if 'Epoch(' in text:
            assert (f'resumed epoch: {before},' in text) == (before > 0)
        if status == -signal.SIGKILL:
            injected[stage(text, saving(work_dir, since))] += 1
            assert last_epoch(work_dir) >= before
            continue
        assert status == 0, text
        assert_finished(work_dir)
        finished += 1
        if sum(injected.values()) == KILLS:
            break
        shutil.rmtree(work_dir)
    print('\nkilled while', 'times', sep='\t')
    for name, times in injected.items():
        print(name, times, sep='\t\t')
    print(f'all {KILLS} survived, {finished} runs finished')


def test_lost_process_ends_the_other(digits, tmp_path):
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        port = str(server.getsockname()[1])
    logs = [tmp_path / f'{rank}.log' for rank in (0, 1)]
    processes = [
        start_training(
            digits,
            tmp_path / 'run',
            log,
            '--launcher',
            'pytorch',
            MASTER_ADDR='127.0.0.1',
            MASTER_PORT=port,
            WORLD_SIZE='2',
            RANK=str(rank),
            LOCAL_RANK=str(rank)) for rank, log in enumerate(logs)
    ]
    assert wait_for(lambda: 'Epoch(train) [1][2/' in logs[0].read_text(),
                    processes[0]), logs[0].read_text()
    os.killpg(processes[1].pid, signal.SIGKILL)
    try:
        assert processes[0].wait(timeout=300) > 0
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert 'onnection closed by peer' in logs[0].read_text()


if __name__ == '__main__':
    fail_everywhere(Path(sys.argv[1]), sys.argv[2])
