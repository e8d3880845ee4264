"""Let ``torch.load`` read mmengine's own checkpoints with its safety on."""
import codecs
import pickle
from typing import Callable

import numpy as np
import torch
from mmengine.logging import HistoryBuffer


def _history_statistic(owner: type, name: str):
    """Stand in for ``getattr`` when a checkpoint is read.

    A pickled :class:`HistoryBuffer` names its four statistics by
    ``getattr(HistoryBuffer, name)``. The real ``getattr`` would let a hostile
    file reach any object.
    """
    if owner is HistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(owner, name)
    raise pickle.UnpicklingError(
        f'a checkpoint may not use getattr({owner!r}, {name!r})')


class _Named:
    """A function under the name that it has in checkpoints."""

    def __init__(self, function: Callable, name: str):
        self.function = function
        self.__module__, _, self.__qualname__ = name.rpartition('.')
        self.__name__ = self.__qualname__

    def __call__(self, *args):
        return self.function(*args)


# Numbers, numpy arrays of them and what mmengine wraps around.
_SAFE = [
    HistoryBuffer,
    codecs.encode,  # of bytes; torch allows it from 2.6 on
    _Named(_history_statistic, 'builtins.getattr'),
    np.ndarray,
    np.dtype,
    type(np.dtype(np.float32)),
    type(np.dtype(np.float64)),
    type(np.dtype(np.int64)),
    # numpy 1 and 2 name the module differently, and files travel.
    *(_Named(value.__reduce__()[0], f'numpy.{core}.multiarray.{name}')
      for value, name in ((np.ones(1), '_reconstruct'),
                          (np.float64(1), 'scalar'))
      for core in ('core', '_core')),
]


def allow_mmengine_checkpoints() -> None:
    """Allow the classes that mmengine saves beside the weights.

    With ``weights_only=True``, the default from torch 2.6 on, ``torch.load``
    refuses the training history in mmengine's checkpoints, so that resuming
    and inference fail. This adds exactly the types of that history to
    torch's list of safe ones: numbers and numpy arrays of them. It does
    nothing before torch 2.4, which has no such list, and may be called
    repeatedly.
    """
    if torch.__version__ >= (2, 4):
        torch.serialization.add_safe_globals(_SAFE)
