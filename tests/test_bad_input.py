"""Bad images, annotations and checkpoints: they work, or end in one error."""
import itertools
import json
import os
import pickle
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine import Config
from mmengine.dataset import Compose
from mmengine.evaluator import Evaluator
from mmengine.registry import DATASETS, MODELS, TRANSFORMS, DefaultScope
from mmengine.runner import Runner

from mmlaplace import cli
from mmlaplace.models import LaplacianFormer

cv2 = pytest.importorskip('cv2')
Image = pytest.importorskip('PIL.Image')
pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / 'configs'
CLASSIFIER = CONFIGS / 'quickstart/laplacianformer-nano_digits.py'
MASK_RCNN = (
    CONFIGS / 'quickstart/mask-rcnn_laplacianformer-nano_fpn_digits.py')
RETINANET = (
    CONFIGS / 'quickstart/retinanet_laplacianformer-nano_fpn_digits.py')

# Width and height as they are shown.
READABLE = dict(
    plain=(80, 60),
    cmyk=(80, 60),
    grey=(80, 60),
    grey_16_bit=(80, 60),
    colour_16_bit=(80, 60),
    palette=(80, 60),
    transparent=(80, 60),
    rotated=(60, 80),
    row=(80, 1),
    column=(1, 60),
    pixel=(1, 1))
UNREADABLE = ['truncated', 'empty', 'text']


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """A folder of images by name, PNG where the pixels have to be exact."""
    folder = tmp_path_factory.mktemp('images')
    smooth = np.random.default_rng(0).integers(
        0, 256, (6, 8, 3), dtype=np.uint8)
    pixels = cv2.resize(smooth, (80, 60), interpolation=cv2.INTER_CUBIC)
    photo = Image.fromarray(pixels)
    rotated = Image.Exif()
    rotated[0x0112] = 6  # shown after a quarter turn
    photo.save(folder / 'plain.png')
    photo.convert('CMYK').save(folder / 'cmyk.jpg')
    photo.convert('L').save(folder / 'grey.png')
    photo.quantize(16).save(folder / 'palette.png')
    photo.convert('RGBA').save(folder / 'transparent.png')
    photo.save(folder / 'rotated.jpg', exif=rotated)
    photo.crop((0, 0, 80, 1)).save(folder / 'row.png')
    photo.crop((0, 0, 1, 60)).save(folder / 'column.png')
    photo.crop((0, 0, 1, 1)).save(folder / 'pixel.png')
    deep = 257 * pixels[..., ::-1].astype(np.uint16)
    cv2.imwrite(str(folder / 'colour_16_bit.png'), deep)
    cv2.imwrite(str(folder / 'grey_16_bit.png'), deep[..., 0])
    jpeg = (folder / 'cmyk.jpg').read_bytes()
    (folder / 'truncated.jpg').write_bytes(jpeg[:300])
    (folder / 'empty.jpg').touch()
    (folder / 'text.jpg').write_text('no image')
    return folder


def find(images, name):
    path, = images.glob(f'{name}.*')
    return str(path)


@pytest.fixture(scope='module')
def classifier():
    from mmpretrain import ImageClassificationInferencer
    torch.manual_seed(0)
    return ImageClassificationInferencer(
        str(CLASSIFIER), pretrained=False, device='cpu')


@pytest.fixture(scope='module', params=[MASK_RCNN, RETINANET],
                ids=['mask-rcnn', 'retinanet'])
def detector(request):
    from mmdet.apis import init_detector
    torch.manual_seed(0)
    return init_detector(str(request.param), device='cpu')


@pytest.mark.parametrize('name', READABLE)
def test_classifier_takes_image(classifier, images, name):
    scores = classifier(find(images, name))[0]['pred_scores']
    assert scores.shape == (10, )
    assert scores.sum() == pytest.approx(1)
    if name in ('colour_16_bit', 'transparent'):
        expected = classifier(find(images, 'plain'))[0]['pred_scores']
        np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize('name', READABLE)
def test_detector_takes_image(detector, images, name):
    from mmdet.apis import inference_detector
    found = inference_detector(detector, find(images, name))
    assert found.ori_shape == READABLE[name][::-1]
    instances = found.pred_instances
    assert len(instances) and instances.scores.isfinite().all()
    assert instances.bboxes.isfinite().all()
    if 'masks' in instances:
        assert instances.masks.shape[1:] == found.ori_shape


@pytest.mark.parametrize('config', [
    'classification/laplacianformer-tiny_8xb128_in1k.py',
    'classification/laplacianformer-huge_8xb64-coslr-30e_in1k-384px.py',
    'detection/mask-rcnn_laplacianformer-t_fpn_1x_coco.py'
])
@pytest.mark.parametrize('name', ['row', 'column', 'pixel'])
def test_full_pipelines_take_thin_images(images, config, name):
    cfg = Config.fromfile(CONFIGS / config)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        pipeline = Compose([
            TRANSFORMS.build(step)
            for step in cfg.test_dataloader.dataset.pipeline
            if step.type != 'LoadAnnotations'
        ])
    size = pipeline(
        dict(img_path=find(images, name), img_id=0))['inputs'].shape[1:]
    if cfg.default_scope == 'mmpretrain':
        assert size[0] == size[1] in (224, 384)
    else:
        assert 1 <= min(size) <= 800 and max(size) <= 1333


@pytest.mark.parametrize('name', UNREADABLE)
def test_unreadable_image_is_an_error(classifier, detector, images, name):
    """That names the file, but for empty ones, where OpenCV's comes first."""
    from mmdet.apis import inference_detector
    path = find(images, name)
    message = 'empty' if name == 'empty' else name
    for run in (lambda: classifier(path),
                lambda: inference_detector(detector, path)):
        with pytest.raises((ValueError, AssertionError, cv2.error),
                           match=message):
            run()


@pytest.fixture
def error(monkeypatch, capsys):
    """Runs a tool that has to fail; returns its only line of error."""

    def run(tool, *arguments):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / 'tools' / tool), run_name='__main__')
        assert stop.value.code == 2
        line, = [
            x for x in capsys.readouterr().err.splitlines()
            if x.startswith('error: ')
        ]
        return line

    return run


# Boxes that remain of each image, in training.
KEPT = dict(
    good=[[5, 5, 35, 35]],
    crowd=[[5, 5, 35, 35]],
    outside=[[0, 0, 20, 20], [80, 50, 96, 64]],
    flat=[],
    empty=[],
    unknown=[])


def annotation(image, bbox, **values):
    left, top, width, height = bbox
    right, bottom = left + width, top + height
    outline = [left, top, right, top, right, bottom, left, bottom]
    return dict(
        dict(
            image_id=image,
            bbox=bbox,
            area=width * height,
            iscrowd=0,
            category_id=1,
            segmentation=[outline]), **values)


@pytest.fixture(scope='module')
def coco(tmp_path_factory):
    """Images of 64 × 96 pixels with one kind of bad annotation each."""
    root = tmp_path_factory.mktemp('coco')
    (root / 'train').mkdir()
    names = [*KEPT, 'missing']
    pixels = np.random.default_rng(0).integers(
        0, 256, (64, 96, 3), dtype=np.uint8)
    for name in KEPT:
        cv2.imwrite(str(root / 'train' / f'{name}.png'), pixels)
    good, crowd, outside, flat, _, unknown, missing = range(len(names))
    # Columns 20 to 59, of which rows 10 to 39.
    runs = [20 * 64 + 10, *[30, 34] * 39, 30, 24 + 36 * 64]
    annotations = [
        annotation(good, [5, 5, 30, 30]),
        annotation(crowd, [5, 5, 30, 30]),
        annotation(
            crowd, [20, 10, 40, 30],
            iscrowd=1,
            segmentation=dict(size=[64, 96], counts=runs)),
        annotation(outside, [200, 5, 30, 30]),
        annotation(outside, [-10, -10, 30, 30]),
        annotation(outside, [80, 50, 100, 100]),
        annotation(flat, [5, 5, 0, 30]),
        annotation(flat, [5, 5, 10, -3]),
        annotation(unknown, [5, 5, 30, 30], category_id=77),
        annotation(missing, [5, 5, 30, 30]),
    ]
    images = [
        dict(id=i, file_name=f'{name}.png', height=64, width=96)
        for i, name in enumerate(names)
    ]
    categories = [dict(id=i + 1, name=str(i)) for i in range(10)]
    for file, count in (('all.json', len(names)), ('present.json', missing)):
        (root / file).write_text(
            json.dumps(
                dict(
                    images=images[:count],
                    annotations=[
                        dict(x, id=i + 1) for i, x in enumerate(annotations)
                        if x['image_id'] < count
                    ],
                    categories=[*categories, dict(id=77, name='strange')])))
    return root


@pytest.fixture(params=[MASK_RCNN, RETINANET], ids=['mask-rcnn', 'retinanet'])
def coco_config(request, coco):
    cfg = Config.fromfile(request.param)
    for loader, file in ((cfg.train_dataloader, 'all.json'),
                         (cfg.test_dataloader, 'present.json')):
        loader.dataset.update(
            data_root=str(coco), ann_file=file, data_prefix=dict(img='train'))
    cfg.test_evaluator.ann_file = str(coco / 'present.json')
    with DefaultScope.overwrite_default_scope('mmdet'):
        yield cfg


def stem(data):
    return Path(data['data_samples'].img_path).stem


def collate(data):
    return dict(
        inputs=[x['inputs'] for x in data],
        data_samples=[x['data_samples'] for x in data])


def test_training_takes_bad_annotations(coco_config):
    settings = coco_config.train_dataloader.dataset
    dataset = DATASETS.build(settings)
    # Without any annotation of a known category, images are left out.
    assert [Path(dataset.get_data_info(i)['img_path']).stem
            for i in range(len(dataset))
            ] == ['good', 'crowd', 'outside', 'flat', 'missing']
    settings.filter_cfg.filter_empty_gt = False
    dataset = DATASETS.build(settings)
    data = [dataset[i] for i in range(len(KEPT))]
    boxes = {
        stem(x): x['data_samples'].gt_instances.bboxes.tensor.tolist()
        for x in data
    }
    assert boxes == KEPT
    ignored = {stem(x): len(x['data_samples'].ignored_instances) for x in data}
    assert {name for name, count in ignored.items() if count} == {'crowd'}
    with pytest.raises(FileNotFoundError, match=r'missing\.png'):
        dataset[len(KEPT)]

    model = MODELS.build(coco_config.model).train()
    for batch in (data, [x for x in data if not KEPT[stem(x)]]):
        losses = model(
            **model.data_preprocessor(collate(batch), True), mode='loss')
        total, _ = model.parse_losses(losses)
        model.zero_grad()
        total.backward()
        assert total.isfinite()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert parameter.grad.isfinite().all(), name


def test_no_known_category_is_one_error(error, coco, tmp_path):
    line = error('train.py', RETINANET, '--work-dir', tmp_path,
                 '--cfg-options', f'train_dataloader.dataset.data_root={coco}',
                 'train_dataloader.dataset.ann_file=all.json',
                 'train_dataloader.dataset.metainfo.classes=("a","b")',
                 'val_dataloader=None', 'val_evaluator=None', 'val_cfg=None')
    assert 'has no image with a box of the classes in its metainfo' in line


def test_evaluation_takes_bad_annotations(coco_config):
    dataset = DATASETS.build(coco_config.test_dataloader.dataset)
    assert len(dataset) == len(KEPT)
    evaluator = Evaluator(coco_config.test_evaluator)
    evaluator.dataset_meta = dataset.metainfo
    model = MODELS.build(coco_config.model).eval()
    for i in range(len(dataset)):
        with torch.no_grad():
            found = model.test_step(collate([dataset[i]]))
        evaluator.process(data_samples=found, data_batch={})
    assert 0 <= evaluator.evaluate(len(dataset))['coco/bbox_mAP'] <= 1


class Call:
    """Pickles as a call of a function, as a hostile file would."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def trap(tmp_path):
    """A folder that a hostile checkpoint must not make."""
    folder = tmp_path / 'trap'
    yield str(folder)
    assert not folder.exists()


@pytest.fixture
def hostile(tmp_path, trap):
    path = tmp_path / 'hostile.pth'
    torch.save(dict(state_dict=Call(os.mkdir, trap)), path)
    return str(path)


@pytest.mark.skipif(
    torch.__version__ < (2, 6), reason='torch.load is not safe by default')
def test_hosts_refuse_hostile_checkpoints(hostile, tmp_path):
    from mmdet.apis import init_detector
    from mmpretrain import ImageClassificationInferencer
    backbone = LaplacianFormer(
        init_cfg=dict(type='Pretrained', checkpoint=hostile))
    runner = Runner(
        torch.nn.Linear(1, 1), str(tmp_path / 'run'), load_from=hostile)
    for load in (lambda: init_detector(MASK_RCNN, hostile, device='cpu'),
                 lambda: ImageClassificationInferencer(
                     str(CLASSIFIER), pretrained=hostile, device='cpu'),
                 backbone.init_weights, runner.load_or_resume):
        with pytest.raises(pickle.UnpicklingError, match='GLOBAL .*mkdir'):
            load()


def test_unreadable_checkpoint_is_one_error(hostile, tmp_path, capsys):
    torch.save(dict(state_dict=dict(weight=torch.ones(1000))),
               tmp_path / 'whole.pth')
    whole = (tmp_path / 'whole.pth').read_bytes()
    for name, content in dict(
            empty=b'', text=b'no weights', truncated=whole[:-500]).items():
        (tmp_path / f'{name}.pth').write_bytes(content)
    torch.save([torch.ones(2)], tmp_path / 'list.pth')
    torch.save(dict(state_dict=torch.ones(2)), tmp_path / 'tensor.pth')
    for name, message in dict(
            empty='cannot read checkpoint .*EOFError',
            text='cannot read checkpoint',
            truncated='cannot read checkpoint',
            list='holds no dict of weights',
            tensor='holds no dict of weights',
            hostile='cannot read checkpoint .*GLOBAL .*mkdir').items():
        with pytest.raises(SystemExit):
            cli.read_checkpoint(str(tmp_path / f'{name}.pth'))
        line, = capsys.readouterr().err.splitlines()
        assert re.match(f'error: .*{message}', line)
        assert f"{name}.pth'" in line


def test_checkpoints_from_the_web_run_nothing(hostile, monkeypatch, capsys):
    """As torch.hub reads them, and mmengine all before torch 2.6."""
    monkeypatch.setattr('mmengine.runner.checkpoint.load_url',
                        lambda *_, **__: torch.load(
                            hostile, weights_only=False))
    with pytest.raises(SystemExit):
        cli.read_checkpoint('https://example.org/hostile.pth')
    assert 'mkdir' in capsys.readouterr().err


@pytest.fixture
def classes(tmp_path):
    """Options for training on an image of each class."""
    for split, name in itertools.product(('train', 'val'), '0123456789'):
        folder = tmp_path / 'data' / split / name
        folder.mkdir(parents=True)
        cv2.imwrite(str(folder / 'image.png'), np.zeros((32, 32, 3), np.uint8))
    return [
        '--work-dir', tmp_path / 'work', '--cfg-options', *(
            f'{split}_dataloader.dataset.data_root={tmp_path / "data"}'
            for split in ('train', 'val', 'test'))
    ]


def test_tools_refuse_hostile_checkpoints(error, hostile, classes, images):
    lines = [
        error('test.py', CLASSIFIER, hostile, *classes),
        error('image_demo.py', CLASSIFIER, hostile, find(images, 'plain')),
        error('train.py', CLASSIFIER, '--resume', hostile, *classes),
        error('train.py', CLASSIFIER, *classes, f'load_from={hostile}'),
        error('train.py', CLASSIFIER, *classes,
              'model.backbone.init_cfg.type=Pretrained',
              f'model.backbone.init_cfg.checkpoint={hostile}')
    ]
    for line in lines:
        assert 'cannot read checkpoint' in line and 'mkdir' in line


@pytest.fixture
def save(tmp_path):
    """Saves random weights of a config, and more."""

    def save_weights(config, **others):
        cfg = Config.fromfile(config)
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            model = MODELS.build(cfg.model)
        path = tmp_path / f'{config.stem}.pth'
        torch.save(dict(others, state_dict=model.state_dict()), path)
        return str(path)

    return save_weights


def test_what_cannot_be_resumed_is_one_error(error, save, classes, trap):
    weights = save(CLASSIFIER)
    assert 'has no meta to resume from' in error('train.py', CLASSIFIER,
                                                 '--resume', weights, *classes)
    # mmengine runs this text as a config.
    config = f'import os; os.mkdir({trap!r})'
    hostile = save(
        CLASSIFIER, message_hub={}, meta=dict(epoch=0, iter=0, config=config))
    assert 'mmengine would run as Python' in error('train.py', CLASSIFIER,
                                                   '--resume', hostile,
                                                   *classes)
    (classes[1] / 'last_checkpoint').write_text('lost.pth')
    for resume in (['--resume', *classes], [*classes, 'resume=True']):
        line = error('train.py', CLASSIFIER, *resume)
        assert "checkpoint 'lost.pth' of" in line
        assert 'last_checkpoint does not exist' in line


def test_other_arch_is_one_error(error, save, classes, images):
    detector = save(RETINANET)
    line = error('image_demo.py', CLASSIFIER, detector, find(images, 'plain'))
    assert 'is not of the model in the config' in line
    # The prefix is forgotten.
    line = error('train.py', CLASSIFIER, *classes,
                 'model.backbone.init_cfg.type=Pretrained',
                 f'model.backbone.init_cfg.checkpoint={detector}')
    assert 'is not of the backbone in the config' in line
    assert 'tensors do not fit; downsample_layers.0.0.conv' in line
    line = error(
        'train.py', CLASSIFIER, *classes, f'load_from={detector}',
        'model.backbone.arch.embed_dims=[8,16,24,32]',
        'model.backbone.arch.num_heads=[1,1,1,1]')
    assert 'from load_from, is not of the backbone' in line


@pytest.mark.parametrize('prefix', ['backbone.', 'backbone'])
def test_classifier_may_start_a_detector(save, prefix):
    cfg = Config.fromfile(MASK_RCNN)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        detector = MODELS.build(cfg.model)
    weights = save(CLASSIFIER)
    cfg.load_from = weights
    cfg.model.backbone.init_cfg = dict(
        type='Pretrained', checkpoint=weights, prefix=prefix)
    cli.check_weights(detector, cfg)


def test_image_demo_names_a_bad_image(error, save, images):
    weights = save(CLASSIFIER)
    for name in UNREADABLE:
        path = find(images, name)
        assert error('image_demo.py', CLASSIFIER, weights,
                     path) == f'error: {path!r} cannot be read as an image'
