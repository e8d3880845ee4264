import copy
import math
import subprocess
import sys

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmlaplace.models import LaplacianFormer

NANO = dict(
    embed_dims=[8, 16, 24, 32], depths=[1, 2, 1, 1], num_heads=[1, 2, 3, 4])
ARCHS = list(LaplacianFormer.arch_zoo)


def nano(**arguments):
    arguments = dict(
        dict(arch=NANO, stem_channels=4, drop_path_rate=0.0), **arguments)
    model = LaplacianFormer(**arguments)
    model.init_weights()
    return model


def shallow(arch):
    """A published size with one block a stage, for its widths."""
    sizes = LaplacianFormer.arch_zoo[arch]
    return LaplacianFormer(
        dict(sizes, depths=[1] * 4), out_indices=(0, 1, 2, 3))


@pytest.mark.parametrize('arch', ARCHS)
def test_published_sizes_build_and_train(arch):
    """The real depth is built; a forward and backward run with one block."""
    with torch.device('meta'):
        model = LaplacianFormer(arch)
    assert [len(blocks) for blocks in model.stages
            ] == LaplacianFormer.arch_zoo[arch]['depths']
    model = shallow(arch).train()
    outputs = model(torch.randn(2, 3, 64, 32))
    assert [x.shape[1] for x in outputs
            ] == LaplacianFormer.arch_zoo[arch]['embed_dims']
    sum(x.square().mean() for x in outputs).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('arch, millions', [('tiny', 12.9), ('small', 24.4),
                                            ('large', 68.3), ('huge', 92.7)])
def test_parameter_count(arch, millions):
    """By hand from the table of sizes, with a 1000-class head."""
    with torch.device('meta'):
        model = nn.Sequential(LaplacianFormer(arch), nn.Linear(512, 1000))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize('height, width', [(32, 32), (33, 65), (65, 33),
                                           (50, 77), (224, 224), (97, 333)])
def test_output_sizes(height, width):
    model = nano(out_indices=(0, 1, 2, 3)).eval()
    with torch.no_grad():
        outputs = model(torch.randn(1, 3, height, width))
    assert [tuple(x.shape) for x in outputs] == [
        (1, dims, math.ceil(height / stride), math.ceil(width / stride))
        for dims, stride in zip(NANO['embed_dims'], (4, 8, 16, 32))
    ]


def test_detection_size():
    model = nano(out_indices=(0, 1, 2, 3)).eval()
    with torch.no_grad():
        outputs = model(torch.randn(1, 3, 800, 1333))
    assert [x.shape[-2:] for x in outputs
            ] == [(200, 334), (100, 167), (50, 84), (25, 42)]
    assert all(x.isfinite().all() for x in outputs)


@pytest.mark.parametrize('shape', [(1, 3, 31, 31), (1, 3, 97, 1),
                                   (1, 3, 31, 64), (3, 64, 64)])
def test_too_small_images(shape):
    with pytest.raises(ValueError, match=r'at least 32 pixels, got \('):
        nano()(torch.zeros(shape))


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet', 'mmpretrain'])
def test_builds_by_name_from_any_registry(scope):
    """In a process that has imported neither the package nor its models."""
    if scope != 'mmengine':
        pytest.importorskip(scope)
    code = f"""
from mmengine import DefaultScope
from {scope}.registry import MODELS
for _ in range(2):
    model = MODELS.build(dict(type='mmlaplace.LaplacianFormer'))
    DefaultScope.get_instance('test', scope_name='{scope}')
print(type(model).__name__)
try:
    MODELS.build(dict(type='mmlaplace.LaplaceFormer'))
except KeyError:
    print('KeyError')
"""
    output = subprocess.run([sys.executable, '-c', code],
                            capture_output=True,
                            text=True)
    assert output.stdout.split() == ['LaplacianFormer', 'KeyError'], (
        output.stderr)


@pytest.mark.parametrize(
    'out_indices', [(0, ), (1, ), (0, 2), (1, 2, 3), (0, 1, 2, 3), 3, [2, 0]])
@pytest.mark.parametrize('frozen_stages', range(-1, 5))
def test_no_parameter_is_left_without_gradient(out_indices, frozen_stages):
    model = nano(out_indices=out_indices, frozen_stages=frozen_stages).train()
    outputs = model(torch.randn(2, 3, 64, 64))
    trainable = [p for p in model.parameters() if p.requires_grad]
    if trainable:
        sum(x.square().mean() for x in outputs).backward()
    assert all(p.grad is not None for p in trainable)


@pytest.mark.parametrize('frozen_stages', range(-1, 5))
def test_frozen_stages(frozen_stages):
    """As in mmdet's ResNet: 0 is the stem, n the stem and n stages."""
    model = nano(out_indices=(0, 1, 2, 3), frozen_stages=frozen_stages)
    parts = [[model.downsample_layers[0]]] + [[
        model.downsample_layers[i], model.stages[i],
        getattr(model, f'norm{i}')
    ] for i in range(4)]
    # The stem is both a part of its own and of the first stage.
    parts[1] = parts[1][1:]
    for mode in (True, False, True):
        model.train(mode)
        for i, modules in enumerate(parts):
            frozen = i <= frozen_stages
            for module in modules:
                assert module.training == (mode and not frozen)
                for parameter in module.parameters():
                    assert parameter.requires_grad != frozen
    before = copy.deepcopy(model.state_dict())
    for output in model(torch.randn(2, 3, 32, 32)):
        if output.requires_grad:
            output.sum().backward(retain_graph=True)
    after = model.state_dict()
    for name, tensor in before.items():
        if 'running_mean' in name:
            stage = int(name.split('.')[1])
            frozen = frozen_stages > stage or (stage == 0 <= frozen_stages)
            assert torch.equal(tensor, after[name]) == frozen, name


def test_norm_eval():
    model = nano(norm_eval=True).train()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert norms and not any(norm.training for norm in norms)
    assert model.stages[0].training
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize('frozen_stages', [-1, 1])
def test_checkpointing_changes_nothing(frozen_stages):
    gradients = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        model = nano(
            with_cp=with_cp,
            drop_path_rate=0.3,
            frozen_stages=frozen_stages,
            out_indices=(0, 3)).double().train()
        torch.manual_seed(1)
        outputs = model(torch.randn(4, 3, 40, 64, dtype=torch.float64))
        loss = sum(x.square().mean() for x in outputs)
        loss.backward()
        gradients.append(
            {n: p.grad
             for n, p in model.named_parameters() if p.requires_grad} |
            dict(loss=loss.detach()))
    torch.testing.assert_close(*gradients)


def test_checkpointing_saves_memory_in_training_only():
    """Counts the elements kept for the backward pass."""

    def kept(with_cp, mode):
        model = nano(with_cp=with_cp).train(mode)
        count = 0

        def pack(tensor):
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.randn(1, 3, 64, 64))
        return count

    assert kept(True, True) < kept(False, True) / 2
    assert kept(True, False) == kept(False, False)


def test_drop_path_rises_linearly():
    model = nano(drop_path_rate=0.4)
    rates = [
        block.drop_path.drop_prob for blocks in model.stages
        for block in blocks
    ]
    torch.testing.assert_close(rates, [0.0, 0.1, 0.2, 0.3, 0.4])
    # Stages that are not built do not change the others.
    model = nano(drop_path_rate=0.4, out_indices=(1, ))
    assert len(model.stages) == 2
    torch.testing.assert_close(model.stages[1][1].drop_path.drop_prob, 0.2)


def test_landmark_ratio_is_halved_from_stage_to_stage():
    for ratio, expected in ((8, [8, 4, 2, 1]), ((6, 5, 4, 3), [6, 5, 4, 3]),
                            (2, [2, 1, 1, 1])):
        model = nano(landmark_ratio=ratio)
        assert [b[0].attn.landmark_ratio for b in model.stages] == expected
        model(torch.randn(1, 3, 50, 70))


def test_published_pooling_at_224():
    """The 7 x 7 grid is pooling by 8, 4, 2, 1; the last stage is exact."""
    grid = nano(out_indices=(0, 1, 2, 3)).eval()
    ratio = nano(out_indices=(0, 1, 2, 3), landmark_ratio=8).eval()
    ratio.load_state_dict(grid.state_dict())
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(grid(x), ratio(x), rtol=0, atol=0)


@pytest.mark.parametrize('options', [
    dict(kernel='gaussian'),
    dict(whitening='literal'),
    dict(whitening='none'),
    dict(rope=False),
    dict(solver='exact'),
    dict(solver='conjugate_gradient'),
    dict(landmark_source='queries_and_keys'),
    dict(scale=1.0, num_iters=3, eps=0.1),
])
def test_every_option_changes_the_output(options):
    x = torch.randn(1, 3, 64, 96)
    plain, other = nano().eval(), nano(**options).eval()
    other.load_state_dict(plain.state_dict(), strict='literal' not in
                          options.values())
    (a, ), (b, ) = plain(x), other(x)
    assert b.isfinite().all() and not torch.allclose(a, b)


def test_an_image_does_not_depend_on_its_batch():
    model = nano().double().eval()
    x = torch.randn(3, 3, 50, 64, dtype=torch.float64)
    torch.testing.assert_close(model(x)[0][1:2], model(x[1:2])[0])


def test_kernel_and_inverse_are_float32_under_autocast(monkeypatch):
    from mmlaplace.ops import reference
    seen = set()
    for name in ('newton_schulz_inverse', 'l1_distance', 'pool_landmarks'):
        function = getattr(reference, name)

        def spy(*args, _function=function, **kwargs):
            result = _function(*args, **kwargs)
            seen.update({args[0].dtype, result.dtype})
            return result

        monkeypatch.setattr(reference, name, spy)
    with torch.autocast('cpu', torch.bfloat16):
        nano(rope=False)(torch.randn(1, 3, 96, 96))
    assert seen == {torch.float32}


def test_layer_depth():
    """Depth never falls from input to output and covers every number."""
    model = nn.ModuleDict(
        dict(backbone=nano(out_indices=(0, 3)), head=nn.Linear(2, 2)))
    depths = {}
    for name, _ in model.named_parameters():
        depth, count = model['backbone'].get_layer_depth(name, 'backbone.')
        assert count == 7
        depths[name] = depth
    assert set(depths.values()) == set(range(7))
    assert depths['backbone.downsample_layers.0.0.conv.weight'] == 0
    assert depths['backbone.stages.0.0.attn.gain'] == 1
    assert depths['backbone.downsample_layers.1.conv.weight'] == 2
    assert depths['backbone.stages.1.1.norm1.weight'] == 3
    assert depths['backbone.stages.3.0.mlp.layers.1.weight'] == 5
    assert depths['backbone.norm3.weight'] == depths['head.weight'] == 6


def test_pretrained_prefix(tmp_path):
    """A classifier's checkpoint as backbone: every tensor equal."""
    source = nano()
    path = str(tmp_path / 'classifier.pth')
    state = {f'backbone.{k}': v for k, v in source.state_dict().items()}
    torch.save(dict(state_dict=state), path)
    pretrained = dict(type='Pretrained', checkpoint=path, prefix='backbone.')
    target = MODELS.build(
        dict(
            type='mmlaplace.LaplacianFormer',
            arch=NANO,
            stem_channels=4,
            init_cfg=pretrained))
    target.init_weights()
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name


def test_other_image_size_needs_no_resize():
    """No table is tied to the size: weights of 224 serve 384 as they are."""
    model = nano().eval()
    assert not any('pos' in name for name in model.state_dict())
    assert model(torch.randn(1, 3, 224, 224))[0].shape[-1] == 7
    assert model(torch.randn(1, 3, 256, 832))[0].shape[-2:] == (8, 26)


@pytest.mark.parametrize(
    'arguments, error, message',
    [(dict(arch='nano'), ValueError, "'tiny', .* got 'nano'"),
     (dict(arch=3), TypeError, 'name or a dict, got 3'),
     (dict(arch=dict(depths=[1])), ValueError, r"keys .* got \('depths',\)"),
     (dict(arch=dict(NANO, depths=[1, 1])), ValueError, 'agree in length'),
     (dict(arch=dict(NANO, depths=[1, 0, 1, 1])), ValueError, 'depths .* 0'),
     (dict(out_indices=()), ValueError, r'out_indices .* got \(\)'),
     (dict(out_indices=(0, 4)), ValueError, 'out_indices .* 0 to 3'),
     (dict(frozen_stages=5), ValueError, 'frozen_stages .* -1 to 4, got 5'),
     (dict(drop_path_rate=1.0), ValueError, 'drop_path_rate .* got 1.0'),
     (dict(landmark_ratio=(8, 4)), ValueError, 'landmark_ratio .* or 4'),
     (dict(landmark_ratio=0.5), ValueError, 'landmark_ratio .* got 0.5'),
     (dict(kernel='cauchy'), ValueError, "kernel .* got 'cauchy'")])
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        LaplacianFormer(**dict(dict(arch=NANO), **arguments))


def fill(model):
    """Set all parameters to waves, the same with any version of torch."""
    for index, parameter in enumerate(model.parameters()):
        wave = torch.sin(
            1.7 * (torch.arange(parameter.numel(), dtype=torch.float64) +
                   index)).view_as(parameter)
        fan_in = parameter[0].numel() if parameter.dim() > 1 else None
        parameter.copy_(1 + wave / 10 if fan_in is None else wave /
                        fan_in**0.5)


@torch.no_grad()
@pytest.mark.parametrize('arch, expected', [
    ('tiny', (-2.193423477038e-4, 9.984590117118e-4, 1.430846757333e-4,
              -1.451969618172e-4)),
    ('small', (-1.889072099758e-4, 7.274725309239e-4, 1.429340814705e-4,
               -1.057372037805e-4)),
    ('medium', (-1.947436873148e-4, 7.224682734992e-4, 1.796974009567e-4,
                -1.060583187508e-4)),
    ('large', (-1.887369972574e-4, 7.287021409235e-4, 1.437916154587e-4,
               -4.053664009400e-4)),
    ('huge', (-2.160565624977e-4, 5.773317518445e-4, -3.785499643475e-5,
              -6.453646822456e-5)),
])
def test_outputs_are_what_they_were(arch, expected):
    """Of the first version, in plain torch, before anything was made fast."""
    model = LaplacianFormer(arch, out_indices=(0, 1, 2, 3)).double().eval()
    fill(model)
    image = torch.sin(
        0.37 * torch.arange(3 * 64 * 96, dtype=torch.float64)).view(
            1, 3, 64, 96)
    for output, value in zip(model(image), expected):
        # A mean that every element counts in, with a weight of its own.
        weights = torch.sin(
            torch.arange(output.numel(), dtype=torch.float64))
        mean = (output * weights.view_as(output)).mean()
        assert mean.item() == pytest.approx(value, rel=1e-7)
