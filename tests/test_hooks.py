"""The hook that watches over the numbers of a training run."""
import copy
import json
import math
from functools import partial

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import Runner
from torch import nn

from mmlaplace.hooks import SolverMonitorHook
from mmlaplace.hooks.solver_monitor_hook import measure, saturated_share
from mmlaplace.models import LaplacianAttention, LaplacianFormer
from mmlaplace.ops import newton_schulz_inverse

ARCH = dict(
    embed_dims=[8, 8, 8, 8], depths=[1, 2, 1, 1], num_heads=[1, 2, 1, 1])
LAYER = 'backbone.stages.1.1.attn'


class Classifier(BaseModel):

    def __init__(self, **arguments):
        super().__init__()
        self.backbone = LaplacianFormer(
            ARCH, stem_channels=4, drop_path_rate=0.0, **arguments)
        self.head = nn.Linear(8, 2)

    def forward(self, images, labels, mode='loss'):
        scores = self.head(self.extract_feat(images)[0].mean((-2, -1)))
        return dict(loss=nn.functional.cross_entropy(scores, labels))

    def extract_feat(self, images):
        return self.backbone(images)


class CallAt(Hook):
    """Calls a function at one point of one iteration."""

    priority = 'HIGHEST'

    def __init__(self, point, iteration, function):
        self.iteration = iteration
        setattr(self, point, partial(self._call, function))

    def _call(self, function, runner, *_, **__):
        if runner.iter + 1 == self.iteration:
            function()


def build(work_dir, model, *hooks, **arguments):
    """A runner of two epochs of two batches."""
    samples = [(torch.randn(3, 72, 64), i % 2) for i in range(4)]
    arguments.setdefault(
        'optim_wrapper',
        dict(optimizer=dict(type='SGD', lr=0.1), clip_grad=dict(max_norm=1)))
    return Runner(
        model=model,
        work_dir=str(work_dir),
        train_dataloader=torch.utils.data.DataLoader(samples, batch_size=2),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        custom_hooks=list(hooks),
        randomness=dict(seed=0),
        experiment_name=work_dir.name,
        log_level='ERROR',
        **arguments)


def logged(work_dir):
    """What the visualizer wrote in each iteration."""
    path, = work_dir.glob('*/vis_data/scalars.json')
    return [json.loads(line) for line in path.read_text().splitlines()]


def definition(layer, x, size, table):
    """Largest residual and share of saturated values, in float64."""
    layer = copy.deepcopy(layer).double()
    queries, keys, _ = layer.project(x.double(), size, table.double())
    batch, heads, _, dims = keys.shape
    image = keys.mT.reshape(batch * heads, dims, *size)
    landmarks = nn.functional.adaptive_avg_pool2d(
        image, (7, 7)).reshape(batch, heads, dims, 49).mT

    def kernel(a, b):
        return torch.exp(-(a[..., None, :] - b[..., None, :, :]).abs().sum(-1)
                         / 4)

    matrix = kernel(landmarks, landmarks)
    inverse = newton_schulz_inverse(
        matrix, 12, 1e-3, positive_definite=True)
    residual = (torch.eye(49) - (matrix + 1e-3 * torch.eye(49)) @ inverse
                ).norm(dim=(-2, -1)).max()
    values = kernel(queries, landmarks)
    return residual.item(), (values < 2**-23).double().mean().item()


def test_logs_largest_residual_and_saturation(tmp_path):
    """Against the definition, at every second iteration, by name."""
    expected = []
    model = Classifier()
    # For values that vanish in one of the two layers.
    move_apart = CallAt(
        'before_train_iter', 1,
        lambda: model.get_submodule(LAYER).qkv.weight.data.mul_(1000))
    for block in model.backbone.stages[1]:
        block.attn.register_forward_hook(lambda layer, args, _: expected.
                                         append(definition(layer, *args)))
    runner = build(
        tmp_path,
        model,
        move_apart,
        dict(type='mmlaplace.SolverMonitorHook', interval=2),
        default_hooks=dict(logger=dict(type='LoggerHook', interval=1)))
    runner.train()
    lines = logged(tmp_path)
    assert not any('residual' in key for key in lines[0])
    for line, layers in zip(lines[1::2], (expected[2:4], expected[6:8])):
        residuals, shares = zip(*layers)
        assert line['residual/backbone.stages.1'] == pytest.approx(
            max(residuals), rel=1e-2)
        assert line['saturated/backbone.stages.1'] == pytest.approx(
            max(shares), abs=1e-3)
        assert max(shares) > 0.05 + min(shares)
    assert 'saturated/backbone.stages.2' in lines[1]
    # The keys of this stage are its landmarks.
    assert 'residual/backbone.stages.2' not in lines[1]


def test_saturated_share():
    """Of values 1, 1 - 2^-24, 1 - 2^-22, 2^-22, 2^-24 and 0."""
    distances = -4 * torch.tensor([1, 1 - 2**-24, 1 - 2**-22, 2**-22, 2**-24,
                                   1e-300], dtype=torch.float64).log()
    zero = torch.zeros(1, 1, dtype=torch.float64)
    assert saturated_share(distances[:, None], zero, 4.0,
                           'laplacian').item() == 4 / 6


@pytest.mark.parametrize('source, solver', [
    ('keys', 'newton_schulz'), ('keys', 'conjugate_gradient'),
    ('keys', 'exact'), ('queries_and_keys', 'newton_schulz'),
    ('queries_and_keys', 'exact')])
@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
def test_residual_falls_with_iterations(source, solver, kernel):
    layer = LaplacianAttention(
        8, 2, (3, 3), landmark_source=source, solver=solver, kernel=kernel,
        eps=0.1)
    x = 20 * torch.randn(2, 80, 8)
    residuals = []
    for num_iters in (1, 50):
        layer.options['num_iters'] = num_iters
        with torch.autocast('cpu', torch.bfloat16):
            residuals.append(measure(layer, x, (8, 10))['residual'])
    start, end = residuals
    assert end < 1e-3
    assert start < 1e-3 if solver == 'exact' else start > 0.1


@pytest.mark.parametrize('with_cp', [False, True])
@pytest.mark.parametrize(
    'wrapper', ['OptimWrapper', 'mmlaplace.CPUAmpOptimWrapper'])
def test_changes_nothing(tmp_path, wrapper, with_cp):
    """Weights are equal to the bit, in mixed precision too."""
    states = []
    for hooks in ([], [SolverMonitorHook(interval=1)]):
        torch.manual_seed(0)
        model = Classifier(with_cp=with_cp)
        build(
            tmp_path / str(len(hooks)),
            model,
            *hooks,
            optim_wrapper=dict(
                type=wrapper, optimizer=dict(type='SGD', lr=0.1))).train()
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.fixture(params=[False, True], ids=['alone', 'distributed'])
def wrap(request, tmp_path):
    """Wraps a model for distributed training, of one process, or does not."""
    if not request.param:
        yield lambda model: model
        return
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield MMDistributedDataParallel
    torch.distributed.destroy_process_group()


def stopped(runner):
    """The message of an error that training has to end in."""
    with pytest.raises(FloatingPointError) as error:
        runner.train()
    return str(error.value)


def test_stops_at_a_loss(tmp_path, wrap):
    """In the second epoch; the layer is one that is not the first."""
    model = Classifier()

    def poison():
        model.get_submodule(LAYER).gain.data.fill_(math.nan)
        before.update(copy.deepcopy(dict(model.named_parameters())))

    before = {}
    message = stopped(
        build(tmp_path, wrap(model), SolverMonitorHook(),
              CallAt('before_train_iter', 3, poison)))
    assert message == (
        'training stops in iteration 3: the loss is nan; the first output '
        f'that is not finite is that of {LAYER} (LaplacianAttention). '
        f'Nothing was saved since; go on from {tmp_path}/epoch_1.pth.')
    assert [x.name for x in tmp_path.glob('*.pth')] == ['epoch_1.pth']
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) or LAYER in name, name


class _NaNGradient(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, math.nan)


@pytest.mark.parametrize('clip_grad', [dict(max_norm=1.0), None])
def test_stops_at_a_gradient(tmp_path, wrap, clip_grad):
    """It arises behind the projection of one layer, of finite losses."""
    model, before = Classifier(), {}
    keep = CallAt('before_train_iter', 1,
                  lambda: before.update(copy.deepcopy(model.state_dict())))
    model.get_submodule(LAYER).qkv.register_forward_hook(
        lambda *args: _NaNGradient.apply(args[-1]))
    message = stopped(
        build(
            tmp_path,
            wrap(model),
            SolverMonitorHook(interval=1),
            keep,
            optim_wrapper=dict(
                optimizer=dict(type='SGD', lr=0.1), clip_grad=clip_grad)))
    assert 'stops in iteration 1: a gradient is not finite' in message
    assert f'is that of {LAYER}.qkv (Linear)' in message
    assert 'there is no checkpoint yet' in message
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_stops_at_an_input(tmp_path):
    runner = build(tmp_path, Classifier(), SolverMonitorHook())
    runner.train_dataloader.dataset[1][0][0, 0, 0] = math.inf
    assert 'the loss is nan and so is the input' in stopped(runner)


def test_stops_at_an_output(tmp_path):
    """Although the loss does not depend on it."""
    model = Classifier(out_indices=(0, 3))
    poison = CallAt(
        'before_train_iter', 2,
        lambda: model.get_submodule(LAYER).gain.data.fill_(math.nan))
    runner = build(tmp_path, model, SolverMonitorHook(interval=2), poison)
    assert f'the output of {LAYER} (LaplacianAttention) is not finite' in (
        stopped(runner))


def test_names_what_a_replay_does_not_show(tmp_path):
    """Losses that are not finite although the outputs of all layers are."""
    model = Classifier()
    parse_losses = model.parse_losses
    model.parse_losses = lambda losses: parse_losses(
        dict(loss=losses['loss'] / 0))
    message = stopped(build(tmp_path, model, SolverMonitorHook()))
    assert 'the loss is inf, while the output of every layer' in message


# Between epochs mmengine's own removes the last before it asks other hooks.
@pytest.mark.parametrize('hook, unit', [
    ('CheckpointHook', 'epoch'), ('mmlaplace.AtomicCheckpointHook', 'epoch'),
    ('mmlaplace.AtomicCheckpointHook', 'iter')])
def test_writes_no_broken_checkpoint(tmp_path, hook, unit):
    """Weights that an update made infinite, of one checkpoint to keep."""
    model = Classifier()

    def poison():
        model.head.weight.data[0, 0] = math.inf

    interval = dict(epoch=1, iter=2)[unit]
    runner = build(
        tmp_path,
        model,
        SolverMonitorHook(),
        CallAt('after_train_iter', 4, poison),
        default_hooks=dict(
            checkpoint=dict(
                type=hook,
                interval=interval,
                by_epoch=unit == 'epoch',
                max_keep_ckpts=1)))
    assert 'head.weight is not finite. Nothing' in stopped(runner)
    path, = tmp_path.glob('*.pth')
    assert path.name == f'{unit}_{interval}.pth'
    state = torch.load(path, weights_only=True)['state_dict']
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_model_can_be_copied_meanwhile(tmp_path):
    """As hooks do that keep an average of the weights."""
    model, copies = Classifier(), []
    build(tmp_path, model, SolverMonitorHook(interval=1),
          CallAt('after_train_iter', 1,
                 lambda: copies.append(copy.deepcopy(model)))).train()
    assert not torch.equal(copies[0].head.weight, model.head.weight)


def test_softmax_has_nothing_to_measure(tmp_path):
    """But is watched all the same."""
    model = Classifier(kernel='softmax')
    build(tmp_path, model, SolverMonitorHook(interval=1)).train()
    model.head.bias.data[0] = math.nan
    message = stopped(build(tmp_path, model, SolverMonitorHook()))
    assert 'that of head (Linear)' in message


def test_bad_interval():
    with pytest.raises(ValueError, match='interval must be 1 or more, got 0'):
        SolverMonitorHook(interval=0)
