"""Watches over the numbers of a training run."""
import math
from functools import partial
from typing import Dict, Iterator, List, NoReturn, Optional, Tuple

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import Tensor, nn

from ..models import LaplacianAttention
from ..ops import reference
from ..ops.arguments import compute_in_float32
from ..registry import HOOKS


def solver_residual(landmarks: Tensor, query_landmarks: Optional[Tensor],
                    scale: float, kernel: str, solver: str, num_iters: int,
                    eps: float) -> Tensor:
    """Compute ||I - P X||_F of what the solver takes for the inverse of P.

    Args:
        landmarks (Tensor): ``(..., m, d)``.
        query_landmarks (Tensor, optional): ``(..., m, d)``.
        scale, kernel, solver, num_iters, eps: As of
            :func:`mmlaplace.ops.laplacian_attention`.

    Returns:
        Tensor: ``(...)``.
    """
    left = landmarks if query_landmarks is None else query_landmarks
    matrix = reference.KERNELS[kernel](left, landmarks, scale)
    identity = torch.eye(
        matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = reference.solve(
        matrix,
        identity.expand_as(matrix),
        solver,
        num_iters,
        eps,
        positive_definite=query_landmarks is None)
    return reference.newton_schulz_residual(matrix, inverse, eps)


def saturated_share(queries: Tensor, keys: Tensor, scale: float,
                    kernel: str) -> Tensor:
    """Compute the share of kernel values that are as good as 0 or 1.

    They differ from it by less than the rounding unit of float32, so they
    have all but no gradient.

    Args:
        queries (Tensor): ``(..., N, d)``.
        keys (Tensor): ``(..., M, d)``.
        scale, kernel: As of :func:`mmlaplace.ops.laplacian_attention`.

    Returns:
        Tensor: One number from 0 to 1.
    """
    values = reference.KERNELS[kernel](queries, keys, scale)
    unit = torch.finfo(torch.float32).eps
    return ((values < unit) | (values > 1 - unit)).to(values.dtype).mean()


@torch.no_grad()
def measure(layer: LaplacianAttention, x: Tensor, size: Tuple[int, int],
            table: Optional[Tensor] = None) -> Dict[str, float]:
    """Measure how the attention fares with an input.

    Args:
        layer (LaplacianAttention): The layer, of any kernel but softmax.
        x, size, table: What its forward takes.

    Returns:
        dict: ``saturated``, of the kernel between queries and landmarks; and
        ``residual``, the largest of all images and heads, where the layer
        inverts a matrix.
    """
    queries, keys, _ = layer.project(x, size, table)
    landmarks, query_landmarks = layer.pool(queries, keys, size)
    options = dict(layer.options)
    options.pop('whitening')
    result = dict(
        saturated=compute_in_float32(
            saturated_share,
            queries,
            keys if landmarks is None else landmarks,
            scale=options['scale'],
            kernel=options['kernel']).item())
    if landmarks is not None:
        result['residual'] = compute_in_float32(
            solver_residual, landmarks, query_landmarks,
            **options).max().item()
    return result


def _tensors(value) -> Iterator[Tensor]:
    """Walk over the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _is_finite(value) -> bool:
    return all(tensor.isfinite().all() for tensor in _tensors(value))


def _describe(model: nn.Module, name: str) -> str:
    return f'{name} ({type(model.get_submodule(name)).__name__})'


class _Replay:
    """Repeats a forward pass and notes the modules in order of execution.

    Attributes:
        order (list[str]): Names of the modules as they finished.
        culprit (str, optional): The first with finite input and an output
            that is not.
        losses (dict): What the model returned.
    """

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict):
        self.order: List[str] = []
        self.culprit: Optional[str] = None
        handles = [
            module.register_forward_hook(
                partial(self._note, name), with_kwargs=True)
            for name, module in model.named_modules() if name
        ]
        try:
            # Not model(...), which would call the monitor again.
            self.losses = model.forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, module: nn.Module, args: tuple, kwargs: dict,
              output) -> None:
        self.order.append(name)
        if (self.culprit is None and not _is_finite(output)
                and _is_finite((args, kwargs))):
            self.culprit = name


@HOOKS.register_module()
class SolverMonitorHook(Hook):
    """Logs how well landmark kernels are inverted, and stops at NaN.

    Every ``interval`` iterations it logs for each stage, such as
    ``backbone.stages.2``:

    - ``residual/STAGE``: the largest ||I - P X||_F of its layers, P being
      the damped landmark kernel and X what the solver takes for its inverse,
      over images and heads of this process. Below 1, more iterations would
      converge. Stages that take the keys for landmarks invert nothing.
    - ``saturated/STAGE``: the largest share, over its layers, of kernel
      values between queries and landmarks that are below 2^-23 or above
      1 - 2^-23. These have all but no gradient.

    Training stops with a FloatingPointError that names the layer, before the
    weights are updated, as soon as the loss or the norm that ``clip_grad``
    measures is not finite. Every ``interval`` iterations the outputs of the
    layers and, without ``clip_grad``, all gradients are looked at. To find
    the layer, the forward pass is repeated, and for gradients the backward
    pass too. Weights and buffers are looked at before a checkpoint is
    written, so the last one stays good.

    In other iterations only the loss is read, before instead of after the
    backward pass. With mixed precision and a loss scale, gradients that
    overflow are not reported: their step is skipped and the scale lowered.
    Models compiled by ``torch.compile`` do not call hooks that come later, so
    no residual is logged for them.

    Args:
        interval (int): Iterations between measurements. Defaults to 50.
    """

    def __init__(self, interval: int = 50):
        if interval < 1:
            raise ValueError(f'interval must be 1 or more, got {interval}')
        self.interval = interval

    def before_run(self, runner: Runner) -> None:
        """Keep the runner for the hooks of model and optimizer."""
        self._runner = runner

    def before_train(self, runner: Runner) -> None:
        """Attach to the model and the optimizer."""
        self._model = (
            runner.model.module
            if is_model_wrapper(runner.model) else runner.model)
        self._layers = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, LaplacianAttention) and not module.softmax
        }
        # Functions, unlike methods, are no part of a copy of the model.
        self._handles = [
            self._model.register_forward_hook(
                lambda *args: self._check_loss(*args), with_kwargs=True),
            runner.optim_wrapper.optimizer.register_step_pre_hook(
                self._check_gradients)
        ]

    def after_train(self, runner: Runner) -> None:
        """Detach."""
        for handle in self._handles:
            handle.remove()

    def before_train_iter(self,
                          runner: Runner,
                          batch_idx: int,
                          data_batch: Optional[dict] = None) -> None:
        """Have the layers measured in the iterations to log."""
        self._due = self.every_n_train_iters(runner, self.interval)
        if self._due:
            self._figures = {}
            self._layer_handles = [
                layer.register_forward_hook(
                    lambda *args, name=name: self._measure(name, *args),
                    with_kwargs=True) for name, layer in self._layers.items()
            ]

    def after_train_iter(self,
                         runner: Runner,
                         batch_idx: int,
                         data_batch: Optional[dict] = None,
                         outputs: Optional[dict] = None) -> None:
        """Log what was measured."""
        self._inputs = None
        if self._due:
            for handle in self._layer_handles:
                handle.remove()
            for name, value in self._figures.items():
                runner.message_hub.update_scalar(f'train/{name}', value)

    def after_train_epoch(self, runner: Runner) -> None:
        """Check the weights before an outdated checkpoint is removed."""
        self._check_weights(self._model.state_dict())

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check the weights of a checkpoint before it is written."""
        self._check_weights(checkpoint['state_dict'])

    def _measure(self, name: str, layer: LaplacianAttention, args: tuple,
                 kwargs: dict, output: Tensor) -> None:
        if not _is_finite(output):
            self._stop(f'the output of {_describe(self._model, name)} is not '
                       'finite')
        # A layer's path ends in the number of its block and `attn`.
        stage = name.rsplit('.', 2)[0]
        for figure, value in measure(layer, *args, **kwargs).items():
            key = f'{figure}/{stage}'
            self._figures[key] = max(value, self._figures.get(key, 0.0))

    def _check_loss(self, model: nn.Module, args: tuple, kwargs: dict,
                    losses) -> None:
        if kwargs.get('mode') != 'loss':
            return
        self._inputs = args, kwargs
        loss = model.parse_losses(losses)[0].detach()
        if loss.isfinite():
            return
        problem = f'the loss is {loss.item()}'
        if not _is_finite(self._inputs):
            self._stop(f'{problem} and so is the input of the model')
        culprit = _Replay(model, args, kwargs).culprit
        if culprit is None:
            self._stop(f'{problem}, while the output of every layer is '
                       'finite when the pass is repeated')
        self._stop(f'{problem}; the first output that is not finite is that '
                   f'of {_describe(model, culprit)}')

    def _check_gradients(self, optimizer: torch.optim.Optimizer, args: tuple,
                         kwargs: dict) -> None:
        scalars = self._runner.optim_wrapper.message_hub.log_scalars
        if 'train/grad_norm' in scalars:
            finite = math.isfinite(scalars['train/grad_norm'].current())
        else:
            finite = not self._due or _is_finite(
                [p.grad for p in self._model.parameters()])
        if not finite:
            self._explain_gradients()

    def _explain_gradients(self) -> NoReturn:
        args, kwargs = self._inputs
        self._model.zero_grad()
        with self._runner.optim_wrapper.optim_context(self._runner.model):
            replay = _Replay(self._model, args, kwargs)
        self._model.parse_losses(replay.losses)[0].backward()
        # Gradients spread from the layer where they arise to those before.
        for name in reversed(replay.order):
            module = self._model.get_submodule(name)
            if not _is_finite([p.grad for p in module.parameters(False)]):
                self._stop('a gradient is not finite; the first in the '
                           'backward pass is that of '
                           f'{_describe(self._model, name)}')
        self._stop('a gradient is not finite, while all are when the pass is '
                   'repeated')

    def _check_weights(self, state: Dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            if not tensor.isfinite().all():
                self._stop(f'{name} is not finite')

    def _stop(self, problem: str) -> NoReturn:
        last = self._runner.message_hub.runtime_info.get('last_ckpt')
        kept = f'go on from {last}' if last else 'there is no checkpoint yet'
        raise FloatingPointError(
            f'training stops in iteration {self._runner.iter + 1}: {problem}. '
            f'Nothing was saved since; {kept}.')
