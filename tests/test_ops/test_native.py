"""What holds the native operators together with the rest of torch.

Their numbers are tested beside their entry points, in the other files.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mmlaplace.ops import (
    laplacian_attention,
    laplacian_kernel,
    newton_schulz_inverse,
)

pytestmark = pytest.mark.usefixtures('native')


def tokens(*shape, dtype=torch.float32):
    return (0.5 * torch.randn(*shape)).to(dtype).requires_grad_()


def strided(tensor):
    """The same values in a layout without dense rows."""
    return tensor.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_()


def kernel_inputs(num_queries=9, num_keys=5, dtype=torch.float32):
    return (tokens(2, 3, num_queries, 4, dtype=dtype),
            tokens(2, 3, num_keys, 4, dtype=dtype))


def inverse_inputs(size=5, dtype=torch.float32):
    points = torch.randn(2, 3, size, 4)
    return laplacian_kernel(points, points).to(dtype).requires_grad_(),


def attention_inputs(num_queries=9, num_keys=7, dtype=torch.float32):
    return (tokens(2, 3, num_queries, 4, dtype=dtype),
            tokens(2, 3, num_keys, 4, dtype=dtype),
            tokens(2, 3, num_keys, 6, dtype=dtype),
            tokens(2, 3, 5, 4, dtype=dtype),
            torch.rand(2, 3).to(dtype).requires_grad_())


def attend(queries, keys, values, landmarks, gain):
    return laplacian_attention(queries, keys, values, landmarks, gain=gain)


def exact_inputs(num_queries=9, num_keys=7, dtype=torch.float32):
    """Those of attention whose landmarks are the keys."""
    *tensors, _, gain = attention_inputs(num_queries, num_keys, dtype)
    return *tensors, gain


def attend_exactly(queries, keys, values, gain):
    return laplacian_attention(queries, keys, values, gain=gain)


def attend_to_broadcast(queries, keys, values, landmarks, gain):
    """With leading dimensions that the entry point expands."""
    return attend(queries, keys[:1], values[:, :1], landmarks[0], gain[0])


def invert_positive_definite(matrix):
    return newton_schulz_inverse(matrix, positive_definite=True)


FUNCTIONS = {
    'kernel': (laplacian_kernel, kernel_inputs),
    'inverse': (newton_schulz_inverse, inverse_inputs),
    'symmetric inverse': (invert_positive_definite, inverse_inputs),
    'attention': (attend, attention_inputs),
    'broadcast attention': (attend_to_broadcast, attention_inputs),
    'exact attention': (attend_exactly, exact_inputs),
}
EACH_FUNCTION = pytest.mark.parametrize(
    'function, make_inputs', FUNCTIONS.values(), ids=FUNCTIONS)
# The operators behind them, with the arguments that are no tensors.
OPERATORS = {
    'kernel': ('laplacian_kernel', kernel_inputs, (4.0, )),
    'inverse': ('newton_schulz_inverse', inverse_inputs, (3, 1e-3, False)),
    'symmetric inverse': ('newton_schulz_inverse', inverse_inputs,
                          (3, 1e-3, True)),
    **{
        f'attention {whitening}': ('laplacian_attention', attention_inputs,
                                   (4.0, whitening, 3, 1e-3))
        for whitening in ('scaled', 'literal', 'none')
    },
    **{
        f'exact attention {whitening}': ('exact_laplacian_attention',
                                         exact_inputs, (4.0, whitening, 1e-3))
        for whitening in ('scaled', 'literal', 'none')
    }
}
EACH_OPERATOR = pytest.mark.parametrize(
    'name, make_inputs, options', OPERATORS.values(), ids=OPERATORS)


def run(function, inputs):
    """The output and the gradients of a weighted sum of it."""
    output = function(*inputs)
    torch.manual_seed(1)
    weight = torch.randn(output.shape).to(output.dtype)
    return output, *torch.autograd.grad(output, inputs, weight)


@EACH_OPERATOR
@pytest.mark.parametrize('dtype', [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize('layout', [lambda x: x, strided],
                         ids=['dense', 'strided'])
def test_opcheck(name, make_inputs, options, dtype, layout):
    torch.library.opcheck(
        getattr(torch.ops.mmlaplace, name).default,
        (*map(layout, make_inputs(dtype=dtype)), *options))


@EACH_OPERATOR
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64], ids=str)
def test_opcheck_of_the_backward(name, make_inputs, options, dtype):
    inputs = [x.detach() for x in make_inputs(dtype=dtype)]
    outputs = getattr(torch.ops.mmlaplace, name)(*inputs, *options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs, )
    # The forward keeps its own result where its gradient is a multiple.
    kept = {'laplacian_kernel': outputs}.get(name, outputs[1:])
    torch.library.opcheck(
        getattr(torch.ops.mmlaplace, f'{name}_backward').default,
        (torch.randn(outputs[0].shape).to(dtype).mT.contiguous().mT, *inputs,
         *kept, *options))


@EACH_OPERATOR
@pytest.mark.parametrize('dtype', [torch.float16, torch.float32], ids=str)
def test_layout_is_that_of_the_fake(name, make_inputs, options, dtype):
    """Of outputs and gradients, where the compiler relies on it."""

    def describe(inputs):
        outputs = getattr(torch.ops.mmlaplace, name)(*inputs, *options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs, )
        gradients = torch.autograd.grad(outputs[0].sum(), inputs)
        return [(x.shape, x.stride(), x.dtype, x.requires_grad)
                for x in (*outputs, *gradients)]

    inputs = [strided(x) for x in make_inputs(dtype=dtype)]
    real = describe(inputs)
    assert not any(requires_grad for *_, requires_grad in real[1:])
    with FakeTensorMode() as mode:
        assert describe([mode.from_tensor(x) for x in inputs]) == real


@EACH_FUNCTION
def test_compile(function, make_inputs):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend='aot_eager')
    for sizes in ({}, {'size': 8} if make_inputs is inverse_inputs else {
            'num_queries': 6, 'num_keys': 11}):
        inputs = make_inputs(**sizes)
        torch.testing.assert_close(
            run(compiled, inputs), run(function, inputs))


@EACH_FUNCTION
@pytest.mark.parametrize('strict', [False, True])
def test_export(function, make_inputs, strict):

    class Module(torch.nn.Module):

        def forward(self, *inputs):
            return function(*inputs)

    example, other = (
        [x.detach() for x in make_inputs()] for _ in range(2))
    program = torch.export.export(Module(), tuple(example), strict=strict)
    assert 'mmlaplace' in str(program.graph)
    torch.testing.assert_close(program.module()(*other), function(*other))


@EACH_FUNCTION
def test_trace(function, make_inputs):
    example, other = make_inputs(), make_inputs()
    traced = torch.jit.trace(function, example)
    torch.testing.assert_close(run(traced, other), run(function, other))


@EACH_FUNCTION
@pytest.mark.parametrize('use_reentrant', [False, True])
def test_checkpoint(function, make_inputs, use_reentrant):

    def checkpointed(*inputs):
        return checkpoint(function, *inputs, use_reentrant=use_reentrant)

    gradients = []
    inputs = make_inputs()
    for each in (function, checkpointed):
        for x in inputs:
            x.grad = None
        each(*inputs).square().sum().backward()
        gradients.append([x.grad for x in inputs])
    assert all(map(torch.equal, *gradients))


@EACH_FUNCTION
@pytest.mark.parametrize(
    'dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str)
def test_autocast_changes_nothing(function, make_inputs, dtype):
    inputs = make_inputs(dtype=dtype)
    expected = run(function, inputs)
    with torch.autocast('cpu', torch.bfloat16):
        result = run(function, inputs)
    assert result[0].dtype == dtype
    assert all(map(torch.equal, result, expected))


@EACH_FUNCTION
def test_second_derivative_is_refused(function, make_inputs):
    inputs = make_inputs()
    gradient, *_ = torch.autograd.grad(
        function(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match='MMLAPLACE_BACKEND=reference'):
        gradient.sum().backward()


@EACH_FUNCTION
def test_gradient_of_some_inputs(function, make_inputs):
    """Each alone has the gradient that it has among others."""
    inputs = make_inputs()
    _, *expected = run(function, inputs)
    for index, exact in enumerate(expected):
        alone = [x.detach() for x in inputs]
        alone[index].requires_grad_()
        output = function(*alone)
        torch.manual_seed(1)
        output.backward(torch.randn(output.shape))
        torch.testing.assert_close(alone[index].grad, exact)
        assert all(x.grad is None for x in alone if x is not alone[index])


@EACH_FUNCTION
def test_no_gradient_is_recorded_where_none_is_asked_for(
        function, make_inputs):
    inputs = make_inputs()
    assert not function(*(x.detach() for x in inputs)).requires_grad
    with torch.no_grad():
        assert not function(*inputs).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(function(*inputs), function(*inputs))


@EACH_FUNCTION
def test_input_is_left_alone(function, make_inputs):
    inputs = make_inputs()
    before = [x.detach().clone() for x in inputs]
    run(function, inputs)
    assert all(map(torch.equal, inputs, before))


def test_solvers_without_a_native_form_take_the_native_kernel():
    """Its gradient passes through the rest of the reference."""
    inputs = [x.double().detach().requires_grad_()
              for x in attention_inputs()[:4]]
    outputs = [
        run(lambda *x: laplacian_attention(*x, solver=solver, num_iters=40),
            inputs) for solver in ('newton_schulz', 'exact')]
    torch.testing.assert_close(*outputs)


# The numeric tests, but for the slower ones.
IN_ONE_INSTRUCTION_SET = """
import sys
import pytest
from mmlaplace.ops import backend
assert backend.status()['cpu_capability'] in sys.argv[1].split(',')
sys.exit(pytest.main(sys.argv[2:] + [
    '-q', '-p', 'no:cacheprovider', '-k', 'native and ('
    'odd_sizes and not 2500 or exponential or nonfinite or nan_stays or '
    'newton_schulz and every_size and not 12) and not float16 and '
    'not literal']))
"""


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ('AVX2', 'AVX512'),
    reason='this processor has neither AVX2 nor AVX-512')
@pytest.mark.parametrize('capability, names', [
    ('default', 'DEFAULT,NO AVX'),
    ('avx2', 'AVX2'),
], ids=['default', 'avx2'])
def test_every_instruction_set(capability, names):
    """The best one is that of all other tests."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable, '-c', IN_ONE_INSTRUCTION_SET,
            names,
            *(str(folder / f'test_{name}.py')
              for name in ('laplacian_kernel', 'newton_schulz',
                           'laplacian_attention'))
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            'ATEN_CPU_CAPABILITY': capability,
            # Memory that malloc hands out is filled with numbers near the
            # largest, so that none of it counts unnoticed.
            'MALLOC_PERTURB_': '128',
        })
    assert done.returncode == 0, done.stdout[-5000:]


def test_operators_refuse_what_does_not_fit():
    """Of callers who go past the entry points."""
    ops = torch.ops.mmlaplace
    queries, keys = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    with pytest.raises(RuntimeError, match='equal leading .*2, 5, 3.*1, 4'):
        ops.laplacian_kernel(queries, keys[:1], 4.0)
    with pytest.raises(RuntimeError, match='size 3 in dimension -1'):
        ops.laplacian_kernel(queries, keys[..., :2], 4.0)
    with pytest.raises(RuntimeError, match='one dtype .* Float .* Double'):
        ops.laplacian_kernel(queries, keys.double(), 4.0)
    with pytest.raises(RuntimeError, match='2 or more dimensions'):
        ops.laplacian_kernel(queries[0, 0], keys[0, 0], 4.0)
    with pytest.raises(RuntimeError, match='size 5 in dimension -1'):
        ops.newton_schulz_inverse(queries, 12, 1e-3, True)
    options = (4.0, 'scaled', 12, 1e-3)
    with pytest.raises(RuntimeError, match='size 4 in dimension -2'):
        ops.laplacian_attention(queries, keys, queries, keys, torch.ones(2),
                                *options)
    with pytest.raises(RuntimeError, match='a key and a landmark'):
        ops.laplacian_attention(queries, keys, keys, keys[:, :0],
                                torch.ones(2), *options)
    with pytest.raises(RuntimeError, match='a gain for each matrix'):
        ops.laplacian_attention(queries, keys, keys, keys, torch.ones(1),
                                *options)
    good = [queries, keys, keys, keys]
    for place, bad, message in (
        (1, keys[..., :2], 'size 3 in dimension -1'),
        (3, keys[..., :2], 'size 3 in dimension -1'),
        (3, keys[:1], 'equal leading'), (3, keys.double(), 'one dtype')):
        tensors = [*good[:place], bad, *good[place + 1:]]
        with pytest.raises(RuntimeError, match=message):
            ops.laplacian_attention(*tensors, torch.ones(2), *options)


def test_backward_operators_refuse_what_does_not_fit():
    ops = torch.ops.mmlaplace
    queries, keys = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    inputs = (queries, keys, keys, keys, torch.ones(2))
    options = (4.0, 'scaled', 12, 1e-3)
    output, *kept = ops.laplacian_attention(*inputs, *options)
    for grad, message in ((output[:, :4], 'size 5 in dimension -2'),
                          (output[..., :2], 'size 3 in dimension -1'),
                          (output[:1], 'equal leading'), (output.double(),
                                                          'one dtype')):
        with pytest.raises(RuntimeError, match=message):
            ops.laplacian_attention_backward(grad, *inputs, *kept, *options)
    for place in range(4):
        for bad, message in ((kept[place][..., :1], 'invalid for input'),
                             (kept[place].half(), 'forward operator')):
            others = [*kept[:place], bad, *kept[place + 1:]]
            with pytest.raises(RuntimeError, match=message):
                ops.laplacian_attention_backward(output, *inputs, *others,
                                                 *options)

    result = ops.laplacian_kernel(queries, keys, 4.0)
    for arguments, message in (
        ((result[:, :4], queries, keys, result), 'size 5 in dimension -2'),
        ((result, queries, keys, result[..., :3]), 'size 4 in dimension -1'),
        ((result, queries, keys[..., :2], result), 'size 3 in dimension -1'),
        ((result[:1], queries, keys, result), 'equal leading'),
        ((result, queries, keys, result.double()), 'one dtype')):
        with pytest.raises(RuntimeError, match=message):
            ops.laplacian_kernel_backward(*arguments, 4.0)
    with pytest.raises(RuntimeError, match='takes floating tensors'):
        ops.laplacian_kernel(queries.long(), keys.long(), 4.0)
