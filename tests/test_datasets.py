"""The quickstart's sets: what is written, and how OpenMMLab reads it."""
import json
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from mmlaplace.datasets import (
    CLASSES,
    digits,
    split_digits,
    write_classification_set,
    write_detection_set,
)

datasets = pytest.importorskip(
    'sklearn.datasets', reason='the digits travel inside scikit-learn')
SMALL = dict(num_train=12, num_val=6)
SPLITS = ('train', 'val')


@pytest.fixture(scope='module')
def classification(tmp_path_factory):
    root = tmp_path_factory.mktemp('digits') / 'classification'
    write_classification_set(root)
    return root


@pytest.fixture(scope='module')
def detection(tmp_path_factory):
    pytest.importorskip('pycocotools', reason='masks are stored as COCO RLE')
    root = tmp_path_factory.mktemp('digits') / 'detection'
    write_detection_set(root, **SMALL)
    return root


def read_coco(root, split):
    path = root / 'annotations' / f'instances_{split}.json'
    return json.loads(path.read_text())


def decode(annotation):
    from pycocotools import mask
    return mask.decode(annotation['segmentation']).astype(bool)


def contents(root):
    return {
        path.relative_to(root): path.read_bytes()
        for path in root.rglob('*') if path.is_file()
    }


def test_split_is_disjoint_complete_and_stratified():
    train, val = split_digits()
    assert len(train) == 1438 and len(val) == 359
    assert sorted([*train, *val]) == list(range(1797))
    target = datasets.load_digits().target
    share = np.bincount(target[val]) / np.bincount(target)
    np.testing.assert_allclose(share, 0.2, atol=0.003)


def test_split_follows_seed():
    for one, same, other in zip(
            split_digits(3), split_digits(3), split_digits(4)):
        np.testing.assert_array_equal(one, same)
        assert set(one) != set(other)


def test_classification_images(classification):
    bunch = datasets.load_digits()
    for split, indices in zip(SPLITS, split_digits()):
        for name in CLASSES:
            paths = list((classification / split / name).iterdir())
            written = sorted(int(path.stem) for path in paths)
            assert written == [
                i for i in indices if bunch.target[i] == int(name)
            ]
            with Image.open(paths[0]) as image:
                assert image.size == (32, 32) and image.mode == 'RGB'
                # Shrunk to 10x10 it is the 8x8 digit inside a blank rim.
                small = np.asarray(
                    image.convert('L').resize((10, 10), Image.Resampling.BOX))
            digit = np.pad(bunch.images[int(paths[0].stem)], 1)
            assert np.corrcoef(small.ravel(), digit.ravel())[0, 1] > 0.95


def test_annotations_are_exact(detection):
    for split in SPLITS:
        coco = read_coco(detection, split)
        sizes = {i['id']: (i['height'], i['width']) for i in coco['images']}
        assert len(sizes) == SMALL[f'num_{split}']
        assert set(sizes.values()) == {(120, 160), (160, 120)}
        for annotation in coco['annotations']:
            mask = decode(annotation)
            assert mask.shape == sizes[annotation['image_id']]
            assert annotation['area'] == mask.sum()
            rows = np.flatnonzero(mask.any(1))
            columns = np.flatnonzero(mask.any(0))
            assert annotation['bbox'] == [
                columns[0], rows[0], columns[-1] - columns[0] + 1,
                rows[-1] - rows[0] + 1
            ]
            x, y, w, h = annotation['bbox']
            assert 0 <= x and x + w <= mask.shape[1]
            assert 0 <= y and y + h <= mask.shape[0]


def test_digits_are_kept_apart(detection):
    for split in SPLITS:
        annotations = read_coco(detection, split)['annotations']
        for image_id in range(1, SMALL[f'num_{split}'] + 1):
            here = [a for a in annotations if a['image_id'] == image_id]
            assert 1 <= len(here) <= 6
            assert sum(decode(a).astype(int) for a in here).max() == 1
            for i, one in enumerate(here):
                for other in here[:i]:
                    assert box_iou(one['bbox'], other['bbox']) < 0.1


def box_iou(one, other):
    corners = np.array([one, other])
    corners[:, 2:] += corners[:, :2]
    low, high = corners[:, :2].max(0), corners[:, 2:].min(0)
    intersection = (high - low).clip(0).prod()
    union = one[2] * one[3] + other[2] * other[3] - intersection
    return intersection / union


def test_canvases_use_digits_of_their_split(detection):
    target = datasets.load_digits().target
    for split, indices in zip(SPLITS, split_digits()):
        coco = read_coco(detection, split)
        names = {c['id']: c['name'] for c in coco['categories']}
        assert names == dict(enumerate(CLASSES, 1))
        for annotation in coco['annotations']:
            assert annotation['source'] in indices
            name = names[annotation['category_id']]
            assert name == str(target[annotation['source']])


def test_ink_is_brighter_than_background(detection):
    coco = read_coco(detection, 'train')
    for image in coco['images']:
        here = [
            decode(a) for a in coco['annotations']
            if a['image_id'] == image['id']
        ]
        with Image.open(detection / 'train' / image['file_name']) as file:
            pixels = np.asarray(file.convert('L'))
        ink = np.logical_or.reduce(here)
        assert pixels.shape == ink.shape
        assert np.median(pixels[ink]) > 150 and np.median(pixels[~ink]) < 115


def test_mask_is_ink_above_half():
    pytest.importorskip('pycocotools', reason='masks are stored as COCO RLE')
    bunch = datasets.load_digits()
    black = np.zeros((120, 160, 3), np.float32)
    instances = digits._paste(black, bunch, np.arange(1), rng_of_one())
    mask = decode(instances[0])
    # One digit on black: a pixel is opacity times colour, and the colour
    # itself where the ink is opaque.
    opacity = black[..., 0] / black[..., 0].max()
    np.testing.assert_array_equal(mask, opacity > 0.5)


def rng_of_one():
    """A generator whose first canvas has one digit."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        if rng.integers(1, 7) == 1:
            return np.random.default_rng(seed)


def test_same_seed_same_bytes(detection, tmp_path):
    write_detection_set(tmp_path / 'same', **SMALL)
    assert contents(tmp_path / 'same') == contents(detection)
    write_detection_set(tmp_path / 'other', seed=1, **SMALL)
    same, other = contents(tmp_path / 'same'), contents(tmp_path / 'other')
    assert same.keys() == other.keys()
    assert all(same[path] != other[path] for path in same)
    # The canvases differ too, not only the digits on them.
    assert (read_coco(tmp_path / 'same', 'train')['images'] !=
            read_coco(tmp_path / 'other', 'train')['images'])


def test_complete_set_is_kept(detection, tmp_path):
    root = shutil.copytree(detection, tmp_path / 'set')
    marker = root / 'val' / '000001.jpg'
    marker.write_bytes(b'kept')
    for overwrite in (False, True):
        counts = write_detection_set(root, overwrite=overwrite, **SMALL)
        assert marker.read_bytes() == b'kept'
    assert counts == {
        split: dict(
            images=SMALL[f'num_{split}'],
            digits=len(read_coco(root, split)['annotations']))
        for split in SPLITS
    }


def test_other_parameters_need_overwrite(detection, tmp_path):
    root = shutil.copytree(detection, tmp_path / 'set')
    before = contents(root)
    with pytest.raises(FileExistsError, match='overwrite=True') as error:
        write_detection_set(root, seed=1, **SMALL)
    assert str(root) in str(error.value)
    assert contents(root) == before
    write_detection_set(root, seed=1, overwrite=True, **SMALL)
    assert contents(root).keys() == before.keys()
    assert contents(root) != before
    assert list(tmp_path.iterdir()) == [root]


def test_damaged_set_needs_overwrite(detection, tmp_path):
    root = shutil.copytree(detection, tmp_path / 'set')
    (root / 'train' / '000002.jpg').unlink()
    with pytest.raises(FileExistsError, match='lacks 1 of its files'):
        write_detection_set(root, **SMALL)
    write_detection_set(root, overwrite=True, **SMALL)
    assert contents(root) == contents(detection)


def test_foreign_files_are_never_deleted(detection, tmp_path):
    root = shutil.copytree(detection, tmp_path / 'set')
    (root / 'train' / 'notes.txt').write_text('mine')
    with pytest.raises(FileExistsError, match='train/notes.txt'):
        write_detection_set(root, seed=1, overwrite=True, **SMALL)
    assert (root / 'train' / 'notes.txt').read_text() == 'mine'

    foreign = tmp_path / 'foreign'
    foreign.mkdir()
    (foreign / 'photo.jpg').write_text('mine')
    with pytest.raises(FileExistsError, match='not written by mmlaplace'):
        write_classification_set(foreign, overwrite=True)
    assert (foreign / 'photo.jpg').read_text() == 'mine'


def interrupt(iterable):
    yield from list(iterable)[:2]
    raise KeyboardInterrupt


@pytest.mark.parametrize('existing', [False, True])
def test_interrupted_write_leaves_no_half_set(detection, tmp_path, existing):
    root = tmp_path / 'set'
    if existing:
        shutil.copytree(detection, root)
    with pytest.raises(KeyboardInterrupt):
        write_detection_set(
            root, seed=1, overwrite=True, progress=interrupt, **SMALL)
    if existing:
        assert contents(root) == contents(detection)
        assert list(tmp_path.iterdir()) == [root]
    else:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('write, name, value, allowed', [
    (write_detection_set, 'num_train', 0, 1),
    (write_detection_set, 'num_val', 2.5, 1),
    (write_detection_set, 'size', 95, 96),
    (write_detection_set, 'seed', -1, 0),
    (write_classification_set, 'size', 7, 8),
    (write_classification_set, 'seed', True, 0),
])
def test_bad_arguments(tmp_path, write, name, value, allowed):
    match = f'{name} must be an integer of at least {allowed}.*{value}'
    with pytest.raises(ValueError, match=match):
        write(tmp_path / 'set', **{name: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('module, package', [
    ('sklearn.datasets', 'scikit-learn'),
    ('pycocotools.mask', 'pycocotools'),
])
def test_missing_package(tmp_path, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    match = rf'{package} .*pip install mmlaplace\[quickstart\]'
    with pytest.raises(ImportError, match=match):
        write_detection_set(tmp_path / 'set', **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_mmpretrain_reads_classification(classification):
    mmpretrain = pytest.importorskip(
        'mmpretrain.datasets', reason='reads the set as mmpretrain does')
    for split, indices in zip(SPLITS, split_digits()):
        dataset = mmpretrain.CustomDataset(
            data_root=str(classification),
            data_prefix=split,
            with_label=True,
            pipeline=[])
        assert tuple(dataset.CLASSES) == CLASSES
        assert len(dataset) == len(indices)
        assert set(dataset.get_gt_labels()) == set(range(10))


def coco_dataset(root, split):
    mmdet = pytest.importorskip(
        'mmdet.datasets', reason='reads the set as mmdet does')
    from mmdet.utils import register_all_modules
    register_all_modules()
    return mmdet.CocoDataset(
        data_root=str(root),
        ann_file=f'annotations/instances_{split}.json',
        data_prefix=dict(img=f'{split}/'),
        metainfo=dict(classes=CLASSES),
        test_mode=True,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True)
        ])


def test_mmdet_reads_boxes_and_masks(detection):
    for split in SPLITS:
        dataset = coco_dataset(detection, split)
        annotations = read_coco(detection, split)['annotations']
        assert len(dataset) == SMALL[f'num_{split}']
        for sample in dataset:
            here = [
                a for a in annotations if a['image_id'] == sample['img_id']
            ]
            masks = np.stack([decode(a) for a in here])
            boxes = np.array([a['bbox'] for a in here])
            boxes[:, 2:] += boxes[:, :2]
            labels = [a['category_id'] - 1 for a in here]
            assert sample['img'].shape[:2] == masks.shape[1:]
            np.testing.assert_array_equal(sample['gt_masks'].masks, masks)
            np.testing.assert_array_equal(sample['gt_bboxes'].tensor, boxes)
            np.testing.assert_array_equal(sample['gt_bboxes_labels'], labels)
            assert not sample['gt_ignore_flags'].any()


def test_coco_metric_scores_truth_as_perfect(detection):
    dataset = coco_dataset(detection, 'val')
    import torch
    from mmdet.evaluation import CocoMetric
    metric = CocoMetric(
        ann_file=str(detection / 'annotations' / 'instances_val.json'),
        metric=['bbox', 'segm'])
    metric.dataset_meta = dataset.metainfo
    for sample in dataset:
        truth = dict(
            bboxes=sample['gt_bboxes'].tensor,
            labels=torch.as_tensor(sample['gt_bboxes_labels']),
            scores=torch.ones(len(sample['gt_bboxes'])),
            masks=torch.as_tensor(sample['gt_masks'].masks))
        metric.process({}, [
            dict(
                img_id=sample['img_id'],
                ori_shape=sample['ori_shape'],
                pred_instances=truth)
        ])
    scores = metric.evaluate(size=len(dataset))
    assert scores['coco/bbox_mAP'] == scores['coco/segm_mAP'] == 1
