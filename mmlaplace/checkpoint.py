"""Let ``torch.load`` read mmengine's own checkpoints with its safety on."""
import pickle

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


def allow_mmengine_checkpoints() -> None:
    """Allow the classes that mmengine saves beside the weights.

    From torch 2.6 on, ``torch.load`` reads with ``weights_only=True`` and
    refuses the training history in mmengine's checkpoints, so that resuming
    and inference fail. This adds exactly the types of that history to
    torch's list of safe ones: numbers and numpy arrays of them. It does
    nothing on an older torch and may be called repeatedly.
    """
    if torch.__version__ < (2, 6):
        return
    array, scalar = np.ones(1), np.float64(1)
    torch.serialization.add_safe_globals([
        HistoryBuffer,
        (_history_statistic, 'builtins.getattr'),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.float32)),
        type(np.dtype(np.float64)),
        type(np.dtype(np.int64)),
        # numpy 1 and 2 name the module differently, and files travel.
        *((value.__reduce__()[0], f'numpy.{core}.multiarray.{name}')
          for value, name in ((array, '_reconstruct'), (scalar, 'scalar'))
          for core in ('core', '_core')),
    ])
