# SPDX-License-Identifier: Apache-2.0
"""The few framework calls that the backend tests need, so that they are written once for every framework."""

import numpy as np

from hyper_parallel.platform import PlatformType, get_platform

platform = get_platform()
IS_TORCH = platform.platform_type is PlatformType.PYTORCH

if IS_TORCH:
    import torch
else:
    import at_once  # noqa: F401 - for what it does
    import mindspore

    from hyper_parallel.platform.mindspore import private

# What a reduction over the ranks gives, from their arrays stacked.
REDUCTIONS = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "prod": lambda x: x.prod(0),
}


def dtype(name):
    """The framework's dtype of a name like "bfloat16"."""
    return platform.str_to_dtype(name)


def tensor(values, name=None):
    """A plain tensor of numpy or Python values, in the dtype of that name or in numpy's."""
    array = np.asarray(values)
    made = (
        torch.from_numpy(array.copy()) if IS_TORCH else mindspore.Tensor(array.copy())
    )
    return made if name is None else made.to(dtype(name))


def array(tensor):
    """The values of a plain tensor as numpy has them; bfloat16 as float32."""
    return platform.tensor_to_numpy(tensor)


def draw(*shape, seed=0):
    """Numbers of both signs without ties, the same on every rank for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def recording():
    """From now on operators are recorded for backward, which torch always does."""
    if not IS_TORCH:
        private.executor().set_grad_flag(True)


def leaf(values, name="float64"):
    """A tensor that gets a gradient."""
    recording()
    return platform.set_tensor_requires_grad(
        tensor(np.asarray(values, dtype=np.float64), name)
    )


def grad(leaf):
    """The gradient of a leaf; None if it got none."""
    return leaf.grad if IS_TORCH else leaf._grad


def run_backward(outputs, gradients=None, keep=False):
    """Backward from some tensors; with ``keep`` it can be done again."""
    if IS_TORCH:
        torch.autograd.backward(outputs, gradients, retain_graph=keep)
    else:
        private.run_backward()(
            tuple(outputs), gradients and tuple(gradients), keep, False, (), True
        )


def backward(outputs, weights):
    """Backward of the sum of ``output * weight`` over all pairs."""
    platform.backward(
        list(outputs),
        [
            tensor(weight).to(out.dtype)
            for out, weight in zip(outputs, weights, strict=True)
        ],
    )


def equal(actual, expected, accuracy=1e-12):
    """Equal in shape and in value to float64 accuracy; tensors or arrays."""
    found, wanted = (
        array(x) if platform.is_tensor(x) else np.asarray(x) for x in (actual, expected)
    )
    assert found.shape == wanted.shape, f"shape {found.shape}, expected {wanted.shape}"
    np.testing.assert_allclose(found, wanted, rtol=accuracy, atol=accuracy)


def check_on_this_rank(collective, simulate, inputs, rank):
    """Compares a collective with ``simulate``: every rank's output from every rank's input, in one process.

    Forward, and the gradient of a randomly weighted sum over all ranks: what this rank's input owes to every output.
    """
    mine = leaf(inputs[rank])
    output = collective(mine)
    everyone = [leaf(x) for x in inputs]
    expected = simulate(everyone)
    equal(output, expected[rank])
    weights = [draw(*y.shape, seed=100 + r) for r, y in enumerate(expected)]
    backward([output], [weights[rank]])
    backward(expected, weights)
    equal(grad(mine), grad(everyone[rank]))


def drawn_by_the_framework(size):
    """Random numbers from an operator of the framework, not by way of the platform."""
    return torch.rand(size) if IS_TORCH else mindspore.ops.rand(size)


def linear(inputs, outputs, bias=True):
    """A linear layer with ``weight`` (outputs, inputs) and ``bias``."""
    return (
        torch.nn.Linear(inputs, outputs, bias)
        if IS_TORCH
        else mindspore.nn.Dense(inputs, outputs, has_bias=bias)
    )


def embedding(count, features):
    """An embedding with ``weight`` (count, features). MindSpore's has no kernel on a CPU."""
    return (torch.nn if IS_TORCH else mindspore.mint.nn).Embedding(count, features)


def tanh(x):
    """The function, in the graph."""
    return (torch if IS_TORCH else mindspore.mint).tanh(x)


def sequential(*modules):
    """Modules one after the other."""
    return (torch.nn.Sequential if IS_TORCH else mindspore.nn.SequentialCell)(*modules)


def module_list(modules):
    """Modules that their owner runs."""
    return (torch.nn.ModuleList if IS_TORCH else mindspore.nn.CellList)(modules)


def state(module):
    """A module's state dict as arrays."""
    return {
        name: array(platform.detach(value))
        for name, value in module.state_dict().items()
    }


def set_grad(leaf, gradient):
    """Puts a gradient where backward would."""
    if IS_TORCH:
        leaf.grad = gradient
    else:
        leaf._grad = gradient


def sgd(module, rate, **options):
    """The framework's optimizer that goes down the gradient."""
    if IS_TORCH:
        return torch.optim.SGD(module.parameters(), rate, **options)
    return mindspore.experimental.optim.SGD(module.trainable_params(), rate, **options)


def optimized(optimizer):
    """The parameters of an optimizer."""
    return [
        parameter
        for group in platform.optimizer_parts(optimizer)[0]
        for parameter in group["params"]
    ]


def dropout(x, share):
    """The framework's functional dropout."""
    return (
        torch.nn.functional.dropout(x, share)
        if IS_TORCH
        else mindspore.ops.dropout(x, share)
    )


def cells(module):
    """(parameters by name, buffers by name)."""
    named = dict(
        module.named_parameters() if IS_TORCH else module.parameters_and_names()
    )
    return named, dict(module.named_buffers())


def reduce(op, tensors):
    """The reduction of tensors element by element, in the graph; what is equal shares the gradient."""
    stacked = (
        torch.stack(list(tensors)) if IS_TORCH else mindspore.ops.stack(list(tensors))
    )
    if IS_TORCH:
        return {
            "sum": torch.sum,
            "avg": torch.mean,
            "max": torch.amax,
            "min": torch.amin,
            "prod": torch.prod,
        }[op](stacked, 0)
    if op == "prod":  # the gradient of MindSpore's own is nan where there is a zero
        whole = tensors[0]
        for part in tensors[1:]:
            whole = whole * part
        return whole
    mint = mindspore.mint
    return {"sum": mint.sum, "avg": mint.mean, "max": mint.amax, "min": mint.amin}[op](
        stacked, 0
    )


def gradient_in_graph(output, leaf):
    """The gradient of a leaf, from which more can be computed."""
    if IS_TORCH:
        return torch.autograd.grad(output, leaf, create_graph=True)[0]
    return private.run_backward()(
        (output,), None, True, True, (leaf,), True, accumulate_grad=False
    )[0]


def gradients_of(loss_of, parameters):
    """The gradients of a function's loss, returned and not accumulated."""
    if IS_TORCH:
        return torch.autograd.grad(loss_of(), parameters)
    compute = mindspore.value_and_grad(loss_of, None, weights=list(parameters))
    return compute()[1]
