"""Registry that makes ``type='mmlaplace.LaplacianFormer'`` resolve.

mmengine imports ``<scope>.registry`` for a scoped type and then the
``locations`` of the registry found there, so a host (mmdet, mmpretrain)
builds our models by name alone, without ``custom_imports``.
"""
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import OPTIM_WRAPPERS as MMENGINE_OPTIM_WRAPPERS
from mmengine.registry import Registry

from .checkpoint import allow_mmengine_checkpoints

MODELS = Registry(
    'model',
    parent=MMENGINE_MODELS,
    scope='mmlaplace',
    locations=['mmlaplace.models'])
OPTIM_WRAPPERS = Registry(
    'optim_wrapper',
    parent=MMENGINE_OPTIM_WRAPPERS,
    scope='mmlaplace',
    locations=['mmlaplace.optim'])
HOOKS = Registry(
    'hook',
    parent=MMENGINE_HOOKS,
    scope='mmlaplace',
    locations=['mmlaplace.hooks'])

# Whoever builds one of our models will load or resume checkpoints of it.
allow_mmengine_checkpoints()
