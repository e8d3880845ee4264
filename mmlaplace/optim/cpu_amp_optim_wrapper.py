"""Mixed precision where there is no GPU."""
from contextlib import contextmanager
from typing import Iterator

import torch
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from ..registry import OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class CPUAmpOptimWrapper(OptimWrapper):
    """Mixed precision in bfloat16 on the CPU.

    mmengine's ``AmpOptimWrapper`` refuses to work without a GPU. Backbone and
    neck run under autocast. The heads take their features in float32 and stay
    there, since mmcv's NMS and RoIAlign have no bfloat16 on the CPU.
    bfloat16 has the exponents of float32, so no loss is scaled. Takes the
    arguments of :class:`mmengine.optim.OptimWrapper`.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Enable mixed precision for a training step.

        Args:
            model (nn.Module): A model with ``extract_feat``, wrapped for
                distributed training or not.
        """
        module = model.module if is_model_wrapper(model) else model
        extract_feat = module.extract_feat

        def extract_feat_in_bfloat16(*args, **kwargs):
            with torch.autocast('cpu', torch.bfloat16):
                features = extract_feat(*args, **kwargs)
            if isinstance(features, Tensor):
                return features.float()
            return tuple(feature.float() for feature in features)

        with super().optim_context(model):
            module.extract_feat = extract_feat_in_bfloat16
            try:
                yield
            finally:
                del module.extract_feat
