"""Tests of the shipped configs: each loads, builds, trains and adds up."""
import argparse
import copy
import importlib.util
import json
import logging
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mmengine import Config, DictAction
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import InstanceData
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from mmlaplace import flops
from mmlaplace.models import LaplacianAttention, LaplacianFormer

pytest.importorskip('mmpretrain')
pytest.importorskip('mmdet')

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(
    path.relative_to(ROOT / 'configs').as_posix()
    for path in (ROOT / 'configs').rglob('*.py')
    if '_base_' not in path.parts)
DETECTORS = [path for path in CONFIGS if path.startswith('detection/')]
ABLATIONS = [path for path in CONFIGS if path.startswith('ablations/')]
SIZES = list(LaplacianFormer.arch_zoo)
IN1K = 'classification/laplacianformer-{}_8xb128_in1k.py'
MASK_RCNN = 'detection/mask-rcnn_laplacianformer-t_fpn_1x_coco.py'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every test runs from another folder, as a user of a package does."""
    monkeypatch.chdir(tmp_path)


@lru_cache(maxsize=None)
def load_once(path):
    return Config.fromfile(ROOT / 'configs' / path)


def load(path, **options):
    cfg = copy.deepcopy(load_once(path))
    cfg.merge_from_dict(options)
    return cfg


def build(cfg):
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        return MODELS.build(cfg.model)


def build_on_meta(cfg):
    with torch.device('meta'):
        return build(cfg)


def tool(name):
    spec = importlib.util.spec_from_file_location(
        name, ROOT / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def classification_batch(classes):
    from mmpretrain.structures import DataSample
    side = 224 if classes == 1000 else 32
    return dict(
        inputs=[
            torch.randint(256, (3, side, side), dtype=torch.uint8)
            for _ in range(2)
        ],
        data_samples=[
            DataSample().set_gt_label(label) for label in (0, classes - 1)
        ])


def detection_batch(size=(97, 130)):
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    boxes = torch.tensor([[8., 10., 60., 70.], [40., 20., 120., 90.]])
    masks = np.zeros((2, *size), dtype=np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist()):
        mask[top:bottom, left:right] = 1
    samples = []
    for _ in range(2):
        sample = DetDataSample(
            metainfo=dict(
                img_shape=size, ori_shape=size, scale_factor=(1., 1.)))
        sample.gt_instances = InstanceData(
            bboxes=boxes,
            labels=torch.tensor([0, 3]),
            masks=BitmapMasks(masks, *size))
        samples.append(sample)
    return dict(
        inputs=[
            torch.randint(256, (3, *size), dtype=torch.uint8)
            for _ in range(2)
        ],
        data_samples=samples)


@lru_cache(maxsize=None)
def train_once(scope, model):
    """Run one forward and backward; return parameters of no finite gradient.

    Args:
        scope (str): Default scope of the config.
        model (str): The model in it as JSON, so that configs which differ in
            the schedule alone are trained once.
    """
    model = json.loads(model)
    if scope == 'mmdet':
        # Padding to a multiple of 32 would hide odd sizes from the backbone.
        model['data_preprocessor']['pad_size_divisor'] = 1
        batch = detection_batch()
    else:
        batch = classification_batch(model['head']['num_classes'])
    network = build(Config(dict(default_scope=scope, model=model))).train()
    with DefaultScope.overwrite_default_scope(scope):
        batch = network.data_preprocessor(batch, training=True)
        losses = network(**batch, mode='loss')
    network.parse_losses(losses)[0].backward()
    return [
        name for name, parameter in network.named_parameters()
        if parameter.requires_grad and (
            parameter.grad is None or not parameter.grad.isfinite().all())
    ]


@pytest.mark.parametrize('path', CONFIGS)
def test_trains(path):
    cfg = load(path)
    model = cfg.model.to_dict()
    if cfg.default_scope == 'mmpretrain':
        # The runner hands it to the model.
        model['data_preprocessor'] = dict(cfg.data_preprocessor)
    backbone = model['backbone']
    # The larger sizes run with one block a stage; the next test builds all.
    if isinstance(backbone['arch'], str) and backbone['arch'] != 'tiny':
        backbone['arch'] = dict(
            LaplacianFormer.arch_zoo[backbone['arch']], depths=[1] * 4)
    backbone['init_cfg'] = None
    model = json.dumps(model, sort_keys=True)
    assert train_once(cfg.default_scope, model) == []


@pytest.mark.parametrize('path', CONFIGS)
def test_builds_as_published(path):
    """Every size at its real depth and width, with a head that fits."""
    cfg = load(path)
    model = build_on_meta(cfg)
    arch = cfg.model.backbone.arch
    if isinstance(arch, str):
        arch = LaplacianFormer.arch_zoo[arch]
        assert cfg.embed_dims == arch['embed_dims']
    assert [len(stage) for stage in model.backbone.stages] == arch['depths']
    assert isinstance(model.backbone, LaplacianFormer)


@pytest.mark.parametrize('path', CONFIGS)
def test_batch_size_is_that_of_the_learning_rate(path):
    """File name, dataloader and auto_scale_lr tell the same batch."""
    cfg = load(path)
    batch = cfg.train_dataloader.batch_size
    named = re.search(r'_(\d+)xb(\d+)[-_]', path)
    if named:
        gpus, named_batch = map(int, named.groups())
        assert batch == named_batch
    else:
        # mmdet's names leave out its 8 GPUs; the quickstart has one process.
        gpus = 1 if path.startswith('quickstart/') else 8
    assert cfg.auto_scale_lr.base_batch_size == gpus * batch
    assert 'accumulative_counts' not in cfg.optim_wrapper
    assert not cfg.get('find_unused_parameters', False)


def decays(cfg):
    """Map the parameters of a config's model to group and decay."""
    model = build_on_meta(cfg)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        wrapper = build_optim_wrapper(
            model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    groups = {
        id(parameter): group
        for group in wrapper.param_groups for parameter in group['params']
    }
    return {
        name: (parameter, groups[id(parameter)])
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize('path', [
    IN1K.format('tiny'),
    'classification/laplacianformer-large_8xb64-coslr-30e_in1k-384px.py',
    MASK_RCNN
])
def test_norms_biases_and_gains_do_not_decay(path):
    cfg = load(path)
    decay = cfg.optim_wrapper.optimizer.weight_decay
    assert decay > 0
    for name, (parameter, group) in decays(cfg).items():
        expected = 0 if parameter.dim() == 1 else decay
        assert group['weight_decay'] == expected, name


@pytest.mark.parametrize('size', ['large', 'huge'])
def test_layer_wise_decay(size):
    """From the head down to the stem the rate falls to ConvNeXt's 0.014."""
    cfg = load('classification/'
               f'laplacianformer-{size}_8xb64-coslr-30e_in1k-384px.py')
    groups = decays(cfg)
    base = cfg.optim_wrapper.optimizer.lr
    assert groups['head.fc.weight'][1]['lr'] == base
    rates = [group['lr'] for _, group in groups.values()]
    stem = groups['backbone.downsample_layers.0.0.conv.weight'][1]['lr']
    assert stem == min(rates)
    assert stem / base == pytest.approx(0.7**12, rel=0.2)
    depth = sum(LaplacianFormer.arch_zoo[size]['depths'])
    assert len(set(rates)) == depth + 2


@pytest.mark.parametrize('path', DETECTORS)
def test_detectors_start_from_the_classifier(path):
    cfg = load(path)
    init_cfg = cfg.model.backbone.init_cfg
    assert init_cfg.type == 'Pretrained'
    assert init_cfg.prefix == 'backbone.'
    classifier = Path(init_cfg.checkpoint).parent.name
    assert f'classification/{classifier}.py' in CONFIGS
    arch = cfg.model.backbone.arch
    assert load(f'classification/{classifier}.py').model.backbone.arch == arch
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper'
    model = build_on_meta(cfg).train()
    norms = [m for m in model.backbone.modules() if isinstance(m, _BatchNorm)]
    assert norms and not any(norm.training for norm in norms)
    layers = [m for m in model.modules() if isinstance(m, LaplacianAttention)]
    assert {layer.landmark_size((200, 334)) for layer in layers} == {(7, 7)}


def test_documented_landmark_ratio():
    cfg = load(MASK_RCNN, **{'model.backbone.landmark_ratio': 8})
    model = build_on_meta(cfg)
    sizes = [(200, 334), (100, 167), (50, 84), (25, 42)]
    for stage, size in zip(model.backbone.stages, sizes):
        assert stage[0].attn.landmark_size(size) == (25, 42)


def test_documented_start_from_nothing():
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    args = parser.parse_args(
        ['--cfg-options', 'model.backbone.init_cfg=None'])
    cfg = load(MASK_RCNN, **args.cfg_options)
    assert cfg.model.backbone.init_cfg is None


@pytest.mark.parametrize('path', ABLATIONS)
def test_ablations_change_one_setting(path):
    parent, child = load(IN1K.format('tiny')), load(path)
    changed = set(child.model.backbone.items()) - set(
        parent.model.backbone.items())
    assert len(changed) == 1
    (name, value), = changed
    # A setting that the backbone has, and not the one it has anyway.
    defaults = build_on_meta(parent).backbone.stages[0][0].attn
    assert f'{name}={value}' not in defaults.extra_repr()
    for model in (parent.model, child.model):
        model.pop('backbone')
    for cfg in (parent, child):
        cfg._cfg_dict.pop('_base_', None)
    assert parent.to_dict() == child.to_dict()


def save_classifier(path):
    """Save a nano classifier whose tensors are all random; return them."""
    classifier = build(load('quickstart/laplacianformer-nano_digits.py'))
    state = {
        name: torch.rand_like(tensor) if tensor.is_floating_point() else
        torch.full_like(tensor, 3)
        for name, tensor in classifier.state_dict().items()
    }
    torch.save(dict(state_dict=state), path)
    return state


def load_backbone(**init_cfg):
    """Initialise a Mask R-CNN; return its backbone and the warnings."""
    cfg = load('quickstart/mask-rcnn_laplacianformer-nano_fpn_digits.py')
    cfg.model.backbone.init_cfg = init_cfg
    detector = build(cfg)
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    try:
        detector.init_weights()
    finally:
        logger.removeHandler(handler)
    return detector.backbone, '\n'.join(messages)


def test_classifier_becomes_backbone(tmp_path):
    state = save_classifier(tmp_path / 'classifier.pth')
    backbone, messages = load_backbone(**dict(
        load(MASK_RCNN).model.backbone.init_cfg,
        checkpoint=str(tmp_path / 'classifier.pth')))
    loaded = backbone.state_dict()
    for name, tensor in state.items():
        if name.startswith('backbone.'):
            torch.testing.assert_close(
                loaded.pop(name[len('backbone.'):]), tensor, rtol=0, atol=0)
    # A classifier has no norms for the outputs of the earlier stages.
    assert {name.split('.')[0] for name in loaded
            } == {'norm0', 'norm1', 'norm2'}
    assert 'unexpected key' not in messages


def test_forgotten_prefix_warns(tmp_path):
    save_classifier(tmp_path / 'classifier.pth')
    _, messages = load_backbone(
        type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'))
    missing = messages.partition('missing keys in source state_dict:')[2]
    assert 'stages.0.0.attn.qkv.weight' in missing


@lru_cache(maxsize=None)
def counted(size):
    return flops.count(load(IN1K.format(size)), (224, 224))


def layers_by_hand(arch):
    """MACs of convolutions and linear layers at 224, with 1000 classes."""
    total = 112**2 * 9 * (3 * 32 + 32 * 32)
    channels = 32
    for dims, depth, side in zip(arch['embed_dims'], arch['depths'],
                                 (56, 28, 14, 7)):
        block = dims * (3 + 1 + 4 + 4) + 9  # qkv, proj, MLP; depthwise 3 x 3
        total += side**2 * dims * (9 * channels + depth * block)
        channels = dims
    return total + channels * 1000


@pytest.mark.parametrize('size', SIZES)
def test_layers_are_counted(size):
    arch = LaplacianFormer.arch_zoo[size]
    assert counted(size)['layers'] == layers_by_hand(arch)


def cdist_flops(left, right, *_, out_shape, **__):
    return 2 * int(np.prod(out_shape)) * left[-1]


def executed_macs(module, *inputs):
    """Count by the torch operators that run, distances included."""
    counter = FlopCounterMode(
        display=False,
        custom_mapping={torch.ops.aten._cdist_forward: cdist_flops})
    with torch.no_grad(), counter:
        module(*inputs)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize('size', ['tiny', 'medium'])
def test_count_agrees_with_the_operators(size):
    model = build_on_meta(load(IN1K.format(size))).eval()
    images = torch.empty(1, 3, 224, 224, device='meta')
    assert counted(size)['total'] == pytest.approx(
        executed_macs(model, images), rel=0.01)


@pytest.mark.parametrize('options', [
    dict(whitening='scaled'),
    dict(whitening='none'),
    dict(landmark_grid=(14, 14)),
    dict(landmark_grid=(28, 30)),
    dict(landmark_ratio=8),
    dict(num_iters=3),
    dict(landmark_source='queries_and_keys'),
    dict(kernel='softmax'),
],
                         ids=str)
def test_attention_count_agrees_with_the_operators(options):
    layer = LaplacianAttention(64, 2, **options).to('meta')
    ours = sum(flops.attention_macs(layer, (28, 30)).values())
    assert ours == pytest.approx(operators_of_attention(layer), rel=0.02)


def operators_of_attention(layer, height=28, width=30):
    """MACs that run in the ops of a layer of 64 channels and 2 heads."""
    tokens = height * width
    x = torch.empty(1, tokens, 64, device='meta')
    table = torch.empty(2, tokens, 16, device='meta')
    linear = tokens * 64 * (4 * 64 + 9)
    # The reference pools with two dense matrices, where each key is counted
    # once in the formula.
    rows, columns = layer.landmark_size((height, width))
    pooled = 1 if layer.landmark_source == 'keys' else 2
    dense = pooled * 64 * (rows * tokens + rows * columns * width)
    if (rows, columns) == (height, width) or layer.softmax:
        dense = pooled = 0
    return (executed_macs(layer, x, (height, width), table) - linear - dense +
            pooled * 64 * tokens)


def test_conjugate_gradient_count():
    layer = LaplacianAttention(64, 2, solver='conjugate_gradient').to('meta')
    ours = sum(flops.attention_macs(layer, (28, 30)).values())
    vectors = 2 * 12 * 5 * 49 * 28 * 30  # dot products and sums
    assert ours - vectors == pytest.approx(
        operators_of_attention(layer), rel=0.01)


def test_exact_count():
    exact, iterated = (
        flops.attention_macs(
            LaplacianAttention(64, 2, solver=solver), (28, 28))
        for solver in ('exact', 'newton_schulz'))
    # Solving for the keys takes the place of the inverse and its product.
    factors = 49**3 // 3
    product = 49 * 49 * 28 * 28
    assert exact['inverse'] == 2 * (factors + product)
    assert iterated['products'] - exact['products'] == 2 * product


def test_mmengine_counts_the_same():
    """Its analysis leaves the distances out and has the norms besides."""
    from mmengine.analysis import get_model_complexity_info
    model = build(load(IN1K.format('tiny'))).eval()
    level = logging.getLogger().level
    info = get_model_complexity_info(model, (3, 224, 224), show_table=False)
    logging.getLogger().setLevel(level)
    ours = counted('tiny')
    assert info['flops'] + ours['kernel'] == pytest.approx(
        ours['total'], rel=0.02)


@pytest.mark.parametrize('size, published', [('tiny', 2.1), ('medium', 7.43)])
def test_count_meets_the_paper(size, published):
    assert counted(size)['without_inverse'] / 1e9 == pytest.approx(
        published, rel=0.03)


def test_detector_count_holds_its_parts():
    """By hand: the heads of Mask R-CNN at one image of 64 x 96."""
    counts = flops.count(load(MASK_RCNN), (64, 96))
    backbone = flops.count(
        load(IN1K.format('tiny')), (64, 96))['layers'] - 512 * 1000
    maps = [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    tokens = [height * width for height, width in maps]
    dims = LaplacianFormer.arch_zoo['tiny']['embed_dims']
    fpn = sum(n * 256 * (d + 9 * 256) for n, d in zip(tokens, dims))
    rpn = sum(tokens) * 256 * (9 * 256 + 3 * 5)
    box = 1000 * (7 * 7 * 256 * 1024 + 1024**2 + 1024 * (81 + 4 * 80))
    mask = 100 * 256 * (14**2 * 9 * 256 * 4 + 14**2 * 4 * 256 + 28**2 * 80)
    assert counts['layers'] == backbone + fpn + rpn + box + mask


@pytest.mark.parametrize('folder',
                         ['classification', 'detection', 'ablations'])
def test_documents_are_in_step(folder):
    """tools/update_macs.py has nothing to write."""
    for path, text in update_macs().documents(folder).items():
        assert path.read_text('utf-8') == text


@lru_cache(maxsize=None)
def update_macs():
    return tool('update_macs')


def test_metafiles_list_every_config():
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text('utf-8'))
    listed = []
    for name in index['Import']:
        text = (ROOT / name).read_text('utf-8')
        # Nothing is published, so there is nothing to link to.
        assert set(re.findall(r'https?://[^\s]+', text)) <= {
            'https://arxiv.org/abs/2604.20368'
        }
        for model in yaml.safe_load(text)['Models']:
            assert Path(model['Config']).stem == model['Name']
            assert not {'Weights', 'Results'} & set(model)
            listed.append(model['Config'])
    assert sorted(listed) == [
        f'configs/{path}' for path in CONFIGS
        if not path.startswith('quickstart/')
    ]


def test_model_index_loads():
    modelindex = pytest.importorskip('modelindex')
    index = modelindex.load(str(ROOT / 'model-index.yml'))
    index.build_models_with_collections()
    assert {model.full_model.paper['URL'] for model in index.models
            } == {'https://arxiv.org/abs/2604.20368'}


def run_get_flops(monkeypatch, *arguments):
    monkeypatch.setattr('sys.argv', ['get_flops.py', *arguments])
    tool('get_flops').main()


def test_get_flops(monkeypatch, capsys):
    run_get_flops(monkeypatch, str(ROOT / 'configs' / IN1K.format('tiny')))
    printed = capsys.readouterr().out
    assert '224 x 224' in printed
    assert f'{counted("tiny")["total"] / 1e9:.3f} G MACs' in printed
    nano = ROOT / 'configs' / 'quickstart' / 'laplacianformer-nano_digits.py'
    run_get_flops(monkeypatch, str(nano), '--shape', '50', '70')
    assert '50 x 70' in capsys.readouterr().out


@pytest.mark.parametrize('arguments, error', [
    (['nowhere.py'], "config 'nowhere.py' does not exist"),
    ([IN1K.format('tiny'), '--shape', '0', '32'], '--shape must be'),
    ([IN1K.format('tiny'), '--shape', '20', '32'], 'at least 32 pixels'),
    ([IN1K.format('tiny'), '--cfg-options', 'model.backbone.arch=micro'],
     "got 'micro'"),
],
                         ids=str)
def test_get_flops_tells_errors_in_a_line(arguments, error, monkeypatch,
                                          capsys):
    if arguments[0] != 'nowhere.py':
        arguments = [str(ROOT / 'configs' / arguments[0]), *arguments[1:]]
    with pytest.raises(SystemExit) as exit:
        run_get_flops(monkeypatch, *arguments)
    assert exit.value.code == 2
    message = capsys.readouterr().err.splitlines()
    assert error in message[-1]
    assert message[-1].startswith('error: ')


def test_readme_config(tmp_path):
    """The ten lines that the README gives for a config of mmdet."""
    readme = (ROOT / 'README.md').read_text('utf-8')
    path = tmp_path / 'config.py'
    path.write_text(re.search('```python\n(_base_.*?)```', readme, re.S)[1])
    cfg = Config.fromfile(path)
    assert cfg.optim_wrapper.optimizer.keys() == {'type', 'lr', 'weight_decay'}
    model = build_on_meta(cfg)
    assert isinstance(model.backbone, LaplacianFormer)
    assert len(model.neck.lateral_convs) == 4
