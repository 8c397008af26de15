# SPDX-License-Identifier: Apache-2.0
"""The compiled warm path: it finds the plans that Python stored, leaves the rest to Python, and loses nothing."""

import gc
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.shard import execution
from hyper_parallel.testing import on_ranks, run_ranks

R, S0 = [Replicate()], [Shard(0)]
ROOT = Path(__file__).resolve().parents[2]


def tensors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    shapes = {
        "x": ((4, 6, 8), S0),
        "y": ((4, 6, 8), S0),
        "w": ((5, 8), R),
        "b": ((8,), R),
    }
    return {
        name: distribute_tensor(torch.randn(shape), mesh, placed)
        for name, (shape, placed) in shapes.items()
    }


SHORT = {  # calls whose second time is compiled
    "two tensors": lambda t: t["x"] + t["y"],
    "a float": lambda t: t["x"] * 2.5,
    "another float": lambda t: t["x"] * -0.5,
    "zero": lambda t: t["x"] * 0.0,
    "infinity": lambda t: t["x"].clamp(max=float("inf")),
    "an int": lambda t: t["x"] * 2,
    "a bool": lambda t: t["x"].sum(-1, True),
    "ints": lambda t: t["x"].view(-1, 6, 2, 4),
    "a tuple": lambda t: t["x"].view((4, -1)),
    "a list": lambda t: t["x"].permute([0, 2, 1]),
    "keywords": lambda t: torch.sum(t["x"], dim=2, keepdim=True),
    "a dtype": lambda t: t["x"].sum(1, dtype=torch.float64),
    "a string": lambda t: F.gelu(t["x"], approximate="tanh"),
    "a function of Python": lambda t: F.softmax(t["x"], -1),
    "tensors by name": lambda t: F.layer_norm(t["x"], (8,), weight=t["b"], bias=t["b"]),
    "a weight": lambda t: F.linear(t["x"], t["w"]),
    "an empty key word": lambda t: F.linear(t["x"], t["w"], bias=None),
    "booleans as result": lambda t: t["x"] > t["y"],
    "in place": lambda t: (t["x"] * 1.0).add_(1.0),
    "in place, several tensors": lambda t: (t["x"] * 1.0).addcmul_(
        t["x"], t["y"], value=0.5
    ),
}
LONG = {  # calls that Python does every time
    "a list of tensors": lambda t: torch.cat([t["x"], t["y"]], 1),
    "an index": lambda t: t["x"][:, 1:3],
    "several results": lambda t: t["x"].max(-1),
}


def counted(call, t):
    """The result of a call, and how often it came to Python."""
    seen, usual = [], DTensor.dispatch

    def dispatch(func, *rest):
        seen.append(func)
        return usual(func, *rest)

    DTensor.dispatch = dispatch
    try:
        return call(t), len(seen)
    finally:
        DTensor.dispatch = usual


def plain(result):
    return [
        one.full_tensor()
        for one in (result if isinstance(result, tuple) else (result,))
    ]


@on_ranks(2)
def test_a_plan_of_python_is_found_by_the_compiled_path():
    assert execution.fast is not None
    t = tensors()
    whole = {name: tensor.full_tensor() for name, tensor in t.items()}
    with torch.no_grad():
        for calls, expected in ((SHORT, 0), (LONG, 1)):
            for name, call in calls.items():
                first, second, (third, count) = call(t), call(t), counted(call, t)
                assert min(count, 1) == expected, name
                true = call(whole)
                for mine in (first, second, third):
                    for one, other in zip(
                        plain(mine),
                        true if isinstance(true, tuple) else (true,),
                        strict=True,
                    ):
                        torch.testing.assert_close(
                            one, other, msg=lambda m, name=name: f"{name}: {m}"
                        )


@on_ranks(2)
def test_arguments_that_are_equal_but_differ_in_type_have_plans_of_their_own():
    x = tensors()["x"]
    for _ in range(2):
        assert (x.to(torch.int64) * 2).dtype is torch.int64
        assert (x.to(torch.int64) * 2.0).dtype is torch.float32
        assert (x.to(torch.int64) * True).dtype is torch.int64
        assert x.sum(1, False).shape == (4, 8)
        assert x.sum(1, True).shape == (4, 1, 8)
        assert (x + 1).dtype is torch.float32
        assert (x.to(torch.bool) + 1).dtype is torch.int64
        assert (x.to(torch.bool) + True).dtype is torch.bool


@on_ranks(2)
def test_gradients_and_modes_are_as_in_python():
    from hyper_parallel.core.dtensor.dtensor import SkipDTensorDispatch

    t = tensors()
    for tensor in t.values():
        tensor.requires_grad_()
    for _ in range(3):
        for tensor in t.values():
            tensor.grad = None
        (
            F.linear(F.layer_norm(t["x"] * t["y"], (8,), t["b"], t["b"]), t["w"]).tanh()
        ).sum().backward()
    whole = {
        name: tensor.full_tensor().detach().requires_grad_()
        for name, tensor in t.items()
    }
    (
        F.linear(
            F.layer_norm(whole["x"] * whole["y"], (8,), whole["b"], whole["b"]),
            whole["w"],
        ).tanh()
    ).sum().backward()
    for name, tensor in t.items():
        torch.testing.assert_close(tensor.grad.full_tensor(), whole[name].grad)
    with SkipDTensorDispatch():
        assert type(t["x"] + t["y"]) is torch.Tensor
    with torch.no_grad():
        assert not (t["x"] + t["y"]).requires_grad
    assert (t["x"] + t["y"]).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(t["x"], t["w"]).dtype is torch.bfloat16
    assert F.linear(t["x"], t["w"]).dtype is torch.float32


@on_ranks(2)
def test_errors_of_the_operator_come_through():
    x = tensors()["x"]
    _ = x + x
    with pytest.raises(RuntimeError, match="shape"):
        x.view(3, 5)
    with pytest.raises(RuntimeError, match="softmax"):
        for _ in range(3):
            x.to(torch.int64).softmax(-1)


@on_ranks(2)
def test_nothing_is_leaked():
    t = tensors()
    kept = [
        t["x"],
        t["x"]._local,
        t["x"]._layout,
        t["x"]._spec,
        t["x"]._shape,
        DTensor,
        torch.float32,
        torch.Tensor.add,
    ]
    with torch.no_grad():
        for call in SHORT.values():
            call(t)
        gc.collect()
        counts = [sys.getrefcount(one) for one in kept]
        for _ in range(300):
            for call in SHORT.values():
                call(t)
        gc.collect()
        after = [sys.getrefcount(one) for one in kept]
    assert all(now - before < 50 for before, now in zip(counts, after, strict=True)), (
        counts,
        after,
    )


def test_it_is_compiled_where_there_is_a_compiler():
    if shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is not None:
        assert execution.fast is not None


def is_compiled():
    return execution.fast is not None


def test_python_does_the_same_alone():
    code = (
        "import sys; sys.path[:0] = ['tests', '.']\n"
        "from hyper_parallel.core.shard import execution\n"
        "assert execution.fast is None\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/distributed/test_as_tensor.py', "
        "'tests/distributed/test_routes.py', 'tests/distributed/test_warm_path.py', "
        "'-k', 'not compiled and not python and not leaked']))\n"
    )
    environment = {**os.environ, "HYPER_PARALLEL_PURE_PYTHON": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)  # whose ranks import more than these
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert run_ranks(is_compiled, 2) == [execution.fast is not None] * 2
