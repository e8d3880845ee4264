"""What the native operators need beside their kernels.

:mod:`.backend` imports this file as soon as it has loaded the binary, whose
``ops/library.cpp`` declares the operators. Here are their fake kernels, which
infer shapes for ``torch.compile`` and ``torch.export``, and their gradients.
"""
import torch

_OPS = torch.ops.mmlaplace


def _register_gradient(name, backward, keep):
    """Make an operator differentiable, once.

    Args:
        name (str): The operator.
        backward (callable): Takes the context and the gradient of the first
            output.
        keep (callable): Takes the inputs and outputs, and returns the tensors
            that backward needs and, as a tuple, its other arguments.
    """

    def setup_context(ctx, inputs, output):
        tensors, ctx.options = keep(inputs, output)
        ctx.save_for_backward(*tensors)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])

    def first_grad_only(ctx, grad, *_):
        grads = backward(ctx, grad)
        return tuple(
            value if needed else None
            for value, needed in zip(grads, ctx.needs_input_grad))

    def refuse(ctx, *_):
        raise RuntimeError(
            f'the gradient of mmlaplace::{name} cannot be differentiated '
            'again; use the reference, MMLAPLACE_BACKEND=reference, with '
            'operators that torch can differentiate twice')

    torch.library.register_autograd(
        f'mmlaplace::{name}', first_grad_only, setup_context=setup_context)
    torch.library.register_autograd(f'mmlaplace::{name}_backward', refuse)


@torch.library.register_fake('mmlaplace::rotary_embedding')
def _(tokens, table, inverse):
    return table.new_empty(tokens.shape)


def _keep_table(ctx, inputs, output):
    tokens, table, ctx.inverse = inputs
    ctx.dtype = tokens.dtype
    ctx.save_for_backward(table)


def _rotary_embedding_backward(ctx, grad):
    table, = ctx.saved_tensors
    grad = _OPS.rotary_embedding(grad, table, not ctx.inverse)
    return grad.to(ctx.dtype), None, None


# Linear in the tokens, hence any number of times differentiable.
torch.library.register_autograd(
    'mmlaplace::rotary_embedding',
    _rotary_embedding_backward,
    setup_context=_keep_table)


@torch.library.register_fake('mmlaplace::laplacian_kernel')
def _(queries, keys, scale):
    return queries.new_empty(*queries.shape[:-1], keys.shape[-2])


@torch.library.register_fake('mmlaplace::laplacian_kernel_backward')
def _(grad, queries, keys, result, scale):
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape)


def _laplacian_kernel_backward(ctx, grad):
    return *_OPS.laplacian_kernel_backward(grad, *ctx.saved_tensors,
                                           *ctx.options), None


_register_gradient(
    'laplacian_kernel', _laplacian_kernel_backward, lambda inputs, output:
    ((*inputs[:2], output), inputs[2:]))


@torch.library.register_fake('mmlaplace::newton_schulz_inverse')
def _(matrix, num_iters, eps, positive_definite):
    return matrix.new_empty(matrix.shape)


@torch.library.register_fake('mmlaplace::newton_schulz_inverse_backward')
def _(grad, matrix, num_iters, eps, positive_definite):
    return matrix.new_empty(matrix.shape)


def _newton_schulz_inverse_backward(ctx, grad):
    return _OPS.newton_schulz_inverse_backward(grad, *ctx.saved_tensors,
                                               *ctx.options), None, None, None


_register_gradient(
    'newton_schulz_inverse', _newton_schulz_inverse_backward,
    lambda inputs, output: (inputs[:1], inputs[1:]))


def _new_outputs(queries, values):
    """Allocate ``(..., N, e)``, in memory that has heads within tokens."""
    *leading, num_queries, _ = queries.shape
    if not leading:
        return queries.new_empty(num_queries, values.shape[-1])
    *outer, heads = leading
    return queries.new_empty(*outer, num_queries, heads,
                             values.shape[-1]).transpose(-3, -2)


@torch.library.register_fake('mmlaplace::laplacian_attention')
def _(queries, keys, values, landmarks, gain, scale, whitening, num_iters,
      eps):
    leading = queries.shape[:-2]
    num_keys, value_dims = values.shape[-2:]
    num_landmarks = landmarks.shape[-2]
    compute_dtype = torch.promote_types(queries.dtype, torch.float32)

    def single(*shape):
        return queries.new_empty(*leading, *shape, dtype=compute_dtype)

    def double(*shape):
        return queries.new_empty(*leading, *shape, dtype=torch.float64)

    return (_new_outputs(queries, values), single(num_keys),
            single(num_landmarks, num_landmarks),
            double(num_landmarks * (num_landmarks + 2)),
            double(num_landmarks * (value_dims + 1) + 2 * value_dims))


@torch.library.register_fake('mmlaplace::laplacian_attention_backward')
def _(grad, queries, keys, values, landmarks, gain, key_scales, inverse,
      query_moments, key_moments, scale, whitening, num_iters, eps):
    return tuple(
        tensor.new_empty(tensor.shape)
        for tensor in (queries, keys, values, landmarks, gain))


def _laplacian_attention_backward(ctx, grad):
    return *_OPS.laplacian_attention_backward(grad, *ctx.saved_tensors,
                                              *ctx.options), *[None] * 4


_register_gradient(
    'laplacian_attention', _laplacian_attention_backward,
    lambda inputs, output: ((*inputs[:5], *output[1:]), inputs[5:]))


@torch.library.register_fake('mmlaplace::exact_laplacian_attention')
def _(queries, keys, values, gain, scale, whitening, eps):
    of_each_key = queries.new_empty(
        keys.shape[:-1],
        dtype=torch.promote_types(queries.dtype, torch.float32))
    return (_new_outputs(queries, values), of_each_key,
            torch.empty_like(of_each_key))


@torch.library.register_fake('mmlaplace::exact_laplacian_attention_backward')
def _(grad, queries, keys, values, gain, key_scales, kernel_mean, scale,
      whitening, eps):
    return tuple(
        tensor.new_empty(tensor.shape)
        for tensor in (queries, keys, values, gain))


def _exact_laplacian_attention_backward(ctx, grad):
    return *_OPS.exact_laplacian_attention_backward(
        grad, *ctx.saved_tensors, *ctx.options), *[None] * 3


_register_gradient(
    'exact_laplacian_attention', _exact_laplacian_attention_backward,
    lambda inputs, output: ((*inputs[:4], *output[1:]), inputs[4:]))
