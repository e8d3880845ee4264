"""Handwritten digits on disk, for classification and for detection.

The digits (1,797 images of 8x8 pixels) and the two photographs behind them
travel inside scikit-learn, so nothing is downloaded. They are written in the
folder layouts of ImageNet and COCO, which OpenMMLab reads without any code of
ours.
"""
import importlib
import json
import tempfile
from numbers import Integral
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = tuple('0123456789')
MANIFEST = 'mmlaplace_manifest.json'
# Raise it when the same parameters give other files than before.
VERSION = 1

SPLITS = ('train', 'val')
HELD_OUT = 0.2
MAX_DIGITS = 6
MAX_IOU = 0.1
# Shortest and longest side of a pasted digit in pixels, blank rim included:
# the ink itself is four fifths of it, about 24 to 56 pixels.
INK_SIDES = (30, 70)
PLACEMENT_TRIES = 20

LICENSES = [
    dict(
        id=1,
        name='Creative Commons Attribution 2.0 (the photographs; '
        'scikit-learn states no licence for the digits)',
        url='https://creativecommons.org/licenses/by/2.0/')
]


def split_digits(seed=0):
    """Split scikit-learn's digits into training and held-out ones.

    The split is by image and stratified by class. scikit-learn does not say
    who wrote which digit, so one writer's digits may be on both sides.

    Args:
        seed (int): Seed of the split, at least 0. Defaults to 0.

    Returns:
        tuple[np.ndarray, np.ndarray]: Indices into ``load_digits()``, int64,
        ascending, of shapes (1438, ) for training and (359, ) held out.

    Raises:
        ValueError: If ``seed`` is not an integer of at least 0.
        ImportError: If scikit-learn is missing.
    """
    seed = _at_least('seed', seed, 0)
    labels = _import('sklearn.datasets').load_digits().target
    rng = np.random.default_rng(seed)
    train, val = [], []
    for label in range(len(CLASSES)):
        indices = rng.permutation(np.flatnonzero(labels == label))
        num_val = round(HELD_OUT * len(indices))
        val.append(indices[:num_val])
        train.append(indices[num_val:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(val))


def write_classification_set(root, size=32, seed=0, overwrite=False):
    """Write the digits as class folders, the layout of ImageNet.

    The files are ``root/{train,val}/<class>/<index>.png``, where ``index`` is
    the digit's four-figure index in ``load_digits()``: RGB of three equal
    8-bit channels, bright ink (up to 255) on black. The folder appears
    complete or not at all. A complete set with the same parameters is kept.

    Args:
        root (str | Path): Folder of the set.
        size (int): Side of the square images in pixels, at least 8. Defaults
            to 32.
        seed (int): Seed of :func:`split_digits`. Defaults to 0.
        overwrite (bool): Whether to replace a set with other parameters.
            Defaults to False.

    Returns:
        dict: ``{'train': {'images': 1438}, 'val': {'images': 359}}``.

    Raises:
        ValueError: If ``size`` or ``seed`` is out of range.
        ImportError: If scikit-learn is missing.
        FileExistsError: If ``root`` holds another set and ``overwrite`` is
            False, or files that this module did not write.
    """
    size = _at_least('size', size, 8)
    seed = _at_least('seed', seed, 0)

    def build(folder):
        digits = _import('sklearn.datasets').load_digits()
        counts = {}
        for split, indices in zip(SPLITS, split_digits(seed)):
            for name in CLASSES:
                (folder / split / name).mkdir(parents=True)
            for index in indices:
                name = CLASSES[digits.target[index]]
                ink = 255 * _ink(digits.images[index], size)
                path = folder / split / name / f'{index:04d}.png'
                _to_image(ink).convert('RGB').save(path)
            counts[split] = dict(images=len(indices))
        return counts

    parameters = dict(task='classification', size=size, seed=seed)
    return _write_once(root, parameters, overwrite, build)


def write_detection_set(root,
                        num_train=600,
                        num_val=100,
                        size=160,
                        seed=0,
                        overwrite=False,
                        progress=iter):
    """Write digits pasted on photographs with boxes and masks, as in COCO.

    The files are ``root/{train,val}/<id>.jpg`` and
    ``root/annotations/instances_{train,val}.json``. A canvas is a darkened
    photograph, 4:3 landscape or portrait, under 1 to 6 digits of random size
    and colour. Training and validation canvases share neither digits nor
    photograph pixels.

    The mask of a digit is where the opacity of its ink is above 0.5, stored
    as compressed RLE. Masks are disjoint, so all of a mask is visible. The
    box is the tight box of the mask as (x, y, width, height) and the area is
    the mask's, both in pixels. Two boxes have an IoU below 0.1. ``source``
    is the digit's index in ``load_digits()``.

    The folder appears complete or not at all. A complete set with the same
    parameters is kept.

    Args:
        root (str | Path): Folder of the set.
        num_train (int): Number of training canvases, at least 1. Defaults to
            600.
        num_val (int): Number of validation canvases, at least 1. Defaults to
            100.
        size (int): Long side of a canvas in pixels, at least 96. The short
            side is three quarters of it. Defaults to 160.
        seed (int): Seed of the canvases and of :func:`split_digits`. Defaults
            to 0.
        overwrite (bool): Whether to replace a set with other parameters.
            Defaults to False.
        progress (Callable): Wraps the range of canvases of a split, as
            ``rich.progress.track`` does. Defaults to ``iter``.

    Returns:
        dict: Numbers of canvases and of pasted digits, as in ``{'train':
        {'images': 600, 'digits': 2080}, 'val': {...}}``.

    Raises:
        ValueError: If ``num_train``, ``num_val``, ``size`` or ``seed`` is out
            of range.
        ImportError: If scikit-learn or pycocotools is missing.
        FileExistsError: If ``root`` holds another set and ``overwrite`` is
            False, or files that this module did not write.
    """
    numbers = dict(
        train=_at_least('num_train', num_train, 1),
        val=_at_least('num_val', num_val, 1))
    # The short side has to hold the largest digit.
    size = _at_least('size', size, 96)
    seed = _at_least('seed', seed, 0)

    def build(folder):
        digits = _import('sklearn.datasets').load_digits()
        photos = _import('sklearn.datasets').load_sample_images()
        info = dict(
            description='Handwritten digits pasted on cropped, resized and '
            'darkened photographs, both from scikit-learn.',
            version=str(VERSION),
            digits=digits.DESCR,
            photographs=photos.DESCR)
        categories = [
            dict(id=i, name=name, supercategory='digit')
            for i, name in enumerate(CLASSES, 1)
        ]
        # Left two thirds of every photo for training, right third held out.
        views = zip(*(np.split(photo, [2 * photo.shape[1] // 3], axis=1)
                      for photo in photos.images))
        (folder / 'annotations').mkdir()
        counts = {}
        for split, pool, backgrounds in zip(SPLITS, split_digits(seed), views):
            (folder / split).mkdir()
            images, annotations = [], []
            for image_id in progress(range(1, numbers[split] + 1)):
                # A canvas has its own stream: it does not depend on how many
                # others there are.
                rng = np.random.default_rng(
                    [seed, SPLITS.index(split), image_id])
                canvas = _background(backgrounds, size, rng)
                for instance in _paste(canvas, digits, pool, rng):
                    annotations.append(
                        dict(
                            id=len(annotations) + 1,
                            image_id=image_id,
                            iscrowd=0,
                            **instance))
                name = f'{image_id:06d}.jpg'
                _to_image(canvas).save(folder / split / name, quality=95)
                height, width, _ = canvas.shape
                images.append(
                    dict(
                        id=image_id,
                        file_name=name,
                        height=height,
                        width=width,
                        license=LICENSES[0]['id']))
            coco = dict(
                info=info,
                licenses=LICENSES,
                images=images,
                annotations=annotations,
                categories=categories)
            path = folder / 'annotations' / f'instances_{split}.json'
            path.write_text(json.dumps(coco))
            counts[split] = dict(images=len(images), digits=len(annotations))
        return counts

    parameters = dict(
        task='detection',
        num_train=numbers['train'],
        num_val=numbers['val'],
        size=size,
        seed=seed)
    return _write_once(root, parameters, overwrite, build)


def _background(photos, size, rng):
    """Cut a darkened canvas, float32 of (height, width, 3), from a photo."""
    photo = photos[rng.integers(len(photos))]
    height, width = rng.permutation([size, 3 * size // 4])
    fit = min(photo.shape[0] / height, photo.shape[1] / width)
    scale = fit * rng.uniform(0.5, 1)
    rows, columns = int(scale * height), int(scale * width)
    y = rng.integers(photo.shape[0] - rows + 1)
    x = rng.integers(photo.shape[1] - columns + 1)
    crop = Image.fromarray(photo[y:y + rows, x:x + columns])
    crop = crop.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(crop, np.float32) * np.float32(rng.uniform(0.2, 0.45))


def _paste(canvas, digits, pool, rng):
    """Paste digits of ``pool`` on ``canvas`` in place; return instances."""
    rle = _import('pycocotools.mask')
    taken = np.zeros(canvas.shape[:2], bool)
    instances = []
    count = rng.integers(1, MAX_DIGITS + 1)
    for index in rng.choice(pool, count):
        side = rng.integers(*INK_SIDES, endpoint=True)
        # Enlarging blurs the ink: steepen its edges, and set the half-way
        # point at 0.45, so that faint strokes stay whole.
        ink = (3 * _ink(digits.images[index], side) - 0.85).clip(0, 1)
        color = rng.uniform(160, 255, 3)
        # A crowded canvas may have no room left: the digit is then left out.
        for _ in range(PLACEMENT_TRIES):
            y = rng.integers(canvas.shape[0] - side + 1)
            x = rng.integers(canvas.shape[1] - side + 1)
            window = np.s_[y:y + side, x:x + side]
            mask = np.zeros_like(taken)
            mask[window] = ink > 0.5
            segmentation = rle.encode(np.asfortranarray(mask, np.uint8))
            box = rle.toBbox(segmentation).tolist()
            others = [instance['bbox'] for instance in instances]
            if (mask & taken).any() or (others and rle.iou(
                [box], others, [0] * len(others)).max() >= MAX_IOU):
                continue
            taken |= mask
            canvas[window] += ink[..., None] * (color - canvas[window])
            area = int(rle.area(segmentation))
            # JSON holds no bytes.
            segmentation['counts'] = segmentation['counts'].decode()
            instances.append(
                dict(
                    category_id=int(digits.target[index]) + 1,
                    bbox=box,
                    area=area,
                    segmentation=segmentation,
                    source=int(index)))
            break
    return instances


def _ink(digit, side):
    """Enlarge a digit (8, 8) of 0..16 to opacities (side, side) of 0..1."""
    # Strokes reach the edge of the 8x8 image; the rim lets them fade out.
    digit = np.pad(digit, 1).astype(np.float32) / 16
    ink = Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC)
    # The cubic filter overshoots.
    return np.asarray(ink).clip(0, 1)


def _to_image(pixels):
    """Round float pixels of 0..255 to an 8-bit image."""
    return Image.fromarray(np.rint(pixels).astype(np.uint8))


def _write_once(root, parameters, overwrite, build):
    """Build a set in a temporary sibling of ``root`` and rename it there."""
    root = Path(root).resolve()
    parameters = dict(version=VERSION, **parameters)
    occupied = root.exists() and (root.is_file() or any(root.iterdir()))
    if occupied:
        found = _read_manifest(root)
        files = _list_files(root)
        missing = set(found['files']) - files
        if found['parameters'] == parameters and not missing:
            return found['counts']
        if not overwrite:
            state = (f'lacks {len(missing)} of its files'
                     if missing else f'has {found["parameters"]}')
            raise FileExistsError(
                f'The set in {root} {state}, but {parameters} is asked for. '
                'Pass overwrite=True (--overwrite on the command line) to '
                'replace it, or choose another folder.')
        foreign = files - {*found['files'], MANIFEST}
        if foreign:
            raise FileExistsError(
                f'{root} is not replaced because it also holds files that '
                f'mmlaplace did not write, such as {min(foreign)}. Move them '
                'away or choose another folder.')

    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
            prefix=f'.{root.name}-', dir=root.parent) as temporary:
        new = Path(temporary, 'new')
        new.mkdir()
        counts = build(new)
        manifest = dict(
            parameters=parameters,
            counts=counts,
            files=sorted(_list_files(new)))
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if occupied:
            root.rename(Path(temporary, 'old'))
        new.rename(root)
    return counts


def _read_manifest(root):
    """Read the manifest of the set in ``root``, which must be ours."""
    path = root / MANIFEST
    if not path.is_file():
        raise FileExistsError(
            f'{root} exists and was not written by mmlaplace (it has no '
            f'{MANIFEST}), so it is left alone, with or without overwrite. '
            'Choose another folder.')
    return json.loads(path.read_text())


def _list_files(folder):
    """List what is in ``folder`` at any depth, folders aside, as a set."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob('*') if not path.is_dir()
    }


def _at_least(name, value, minimum):
    """Return the argument as int, or raise ValueError naming it."""
    if (not isinstance(value, Integral) or isinstance(value, bool)
            or value < minimum):
        raise ValueError(f'{name} must be an integer of at least {minimum}, '
                         f'but got {value!r}')
    return int(value)


def _import(name):
    """Import a module that only the quickstart needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split('.')[0].replace('sklearn', 'scikit-learn')
        raise ImportError(
            f'{package} could not be imported ({error}). Install it with '
            '`pip install mmlaplace[quickstart]`.') from error
