# SPDX-License-Identifier: Apache-2.0
"""No program here costs more collectives than it costs with torch's own distributed tensors, and the values are right.

Both libraries run the same program in the same ranks. Torch's count is taken by its own CommDebugMode when the test
runs, after the tensors have been distributed, which costs torch a broadcast or a scatter.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.tensor as native
from torch.distributed.device_mesh import init_device_mesh as init_native_mesh
from torch.distributed.tensor.debug import CommDebugMode

import hyper_parallel
from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import explicit
from hyper_parallel.core.shard import OperatorError
from hyper_parallel.testing import on_ranks

INF, NAN = float("inf"), float("nan")


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# --- the same program for both libraries


@dataclass
class Library:
    """How one of the two makes its tensors, or how plain torch does, which has neither a mesh nor parts."""

    module: Any
    mesh: Any

    def put(self, data, placement="R", recorded=False):
        """A tensor that lies so: "R", or "S0" for a shard along dim 0."""
        if self.module is None:
            return data.clone().requires_grad_(recorded)
        shards = placement != "R"
        placed = (
            self.module.Shard(int(placement[1:])) if shards else self.module.Replicate()
        )
        return self.module.distribute_tensor(
            data.clone(), self.mesh, [placed]
        ).requires_grad_(recorded)

    def pending(self, op, seed=0):
        """A tensor of which every rank has a part."""
        parts = [
            draw(5, 3, seed=10 * seed + rank)
            for rank in range(torch.distributed.get_world_size())
        ]
        if self.module is None:
            return getattr(torch.stack(parts), f"a{op}")(0)
        part = parts[torch.distributed.get_rank()]
        return self.module.DTensor.from_local(
            part, self.mesh, [self.module.Partial(op)]
        )


@dataclass
class Program:
    """``make`` gives the tensors, ``run`` what is counted; a list of its results is compared."""

    make: Callable[[Library], Any]
    run: Callable[..., Any]


def pointwise(run, *ops, beside=False):
    """A program on tensors in which these reductions are pending, and one that every rank has."""

    def make(library):
        tensors = [library.pending(op, seed) for seed, op in enumerate(ops)]
        return [*tensors, library.put(draw(5, 3, seed=99))] if beside else tensors

    return Program(make, run)


def along(run, shape=(8, 12), placement="S1", recorded=False):
    """A program on one tensor that is cut."""
    return Program(
        lambda library: [library.put(draw(*shape), placement, recorded)], run
    )


def differentiated(run, **how):
    """The program with its backward: what the tensor's gradient is."""

    def run_both(x):
        found = run(x)
        (found**2).sum().backward()
        return [found.detach(), x.grad]

    return along(run_both, recorded=True, **how)


def trained(layer, data, placement):
    """A training step of a layer with replicated parameters, each made by its name's shape."""

    def make(library):
        parameters = layer().named_parameters()
        placed = {
            name: library.put(draw(*p.shape, seed=i + 1), "R", True)
            for i, (name, p) in enumerate(parameters)
        }
        module = layer()
        for name, value in placed.items():
            module.register_parameter(name, torch.nn.Parameter(value.detach()))
        return [
            module,
            library.put(data, placement),
            torch.optim.SGD(module.parameters(), 0.01),
        ]

    def run(module, x, optimizer):
        (module(x) ** 2).sum().backward()
        optimizer.step()
        return [p.detach() for p in module.parameters()]

    return Program(make, run)


PROGRAMS = {
    # Reductions of Partial tensors that may wait.
    "neg of a maximum": pointwise(torch.neg, "max"),
    "neg of a minimum": pointwise(torch.neg, "min"),
    "a maximum plus a copy": pointwise(torch.add, "max", beside=True),
    "a minimum minus a copy": pointwise(torch.sub, "min", beside=True),
    "a maximum plus a number": pointwise(lambda x: x + 1.5, "max"),
    "a number minus a minimum": pointwise(lambda x: 1.5 - x, "min"),
    "maximum of two maxima": pointwise(torch.maximum, "max", "max"),
    "minimum of two minima": pointwise(torch.minimum, "min", "min"),
    "maximum with a copy": pointwise(torch.maximum, "max", beside=True),
    "exp of a maximum": pointwise(torch.exp, "max"),
    "relu of a minimum": pointwise(torch.relu, "min"),
    "clamp of a maximum": pointwise(lambda x: x.clamp(-1, 1), "max"),
    "a cast of a maximum": pointwise(lambda x: x.to(torch.float32), "max"),
    "a chain on maxima": pointwise(
        lambda x, y: torch.maximum(x.exp(), y + 1.0).neg(), "max", "max"
    ),
    # Reductions over a dim that is cut.
    "std": along(lambda x: x.std(1)),
    "std of all": along(lambda x: x.std()),
    "std, backward": differentiated(lambda x: x.std(1)),
    "var": along(lambda x: x.var(1)),
    "var, backward": differentiated(lambda x: x.var(1)),
    "var_mean": along(lambda x: torch.var_mean(x, 1)),
    "std_mean": along(lambda x: torch.std_mean(x, 1)),
    "logsumexp": along(lambda x: x.logsumexp(1)),
    "logsumexp, backward": differentiated(lambda x: x.logsumexp(1)),
    "softmax": along(lambda x: x.softmax(1)),
    "log_softmax": along(lambda x: x.log_softmax(1)),
    "topk": along(lambda x: x.topk(2, 1)),
    "topk, backward": differentiated(lambda x: x.topk(2, 1)[0]),
    "max with places": along(lambda x: x.max(1)),
    "max with places, backward": differentiated(lambda x: x.max(1)[0]),
    "argmin": along(lambda x: x.argmin(1)),
    "amax, backward": differentiated(lambda x: x.amax(1)),
    "sort": along(lambda x: x.sort(1)),
    "histc": along(lambda x: torch.histc(x, 4)),
    "histc between bounds": along(lambda x: torch.histc(x, 4, -1, 1)),
    # A part of a tensor that is cut.
    "slice": along(lambda x: x[1:5], placement="S0"),
    "slice, backward": differentiated(lambda x: x[:2], placement="S0"),
    "select": along(lambda x: x[3], placement="S0"),
    "select, backward": differentiated(lambda x: x[3], placement="S0"),
    # A training step: torch leaves the gradients of weights in parts, and sums each of them in the optimizer.
    "a step of a convolution": trained(
        lambda: torch.nn.Conv2d(3, 4, 3, padding=1), draw(4, 3, 5, 5), "S0"
    ),
    "a step of a layer norm": trained(
        lambda: torch.nn.LayerNorm(6), draw(2, 8, 6), "S1"
    ),
    "a step of an RMS norm": trained(lambda: torch.nn.RMSNorm(6), draw(2, 8, 6), "S1"),
}


def results_of(found):
    return list(found) if isinstance(found, (list, tuple)) else [found]


def whole(value):
    return value.full_tensor().detach()


def counts_of(program):
    """(ours, torch's) collectives, after both sets of values have been compared with those of plain torch."""
    ranks = torch.distributed.get_world_size()
    ours = Library(
        hyper_parallel, init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    )
    theirs = Library(native, init_native_mesh("cpu", (ranks,)))
    expected = results_of(program.run(*program.make(Library(None, None))))
    tensors = program.make(ours)
    with CommunicationLedger(ours.mesh) as ledger:
        found = results_of(program.run(*tensors))
    tensors = program.make(theirs)
    with CommDebugMode() as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own
        native_found = results_of(program.run(*tensors))
    for mine, theirs_, true in zip(found, native_found, expected, strict=True):
        torch.testing.assert_close(whole(mine), true.detach())
        torch.testing.assert_close(
            whole(theirs_), true.detach()
        )  # a control: it is the same program
    return sum(ledger.counts().values()), comm.get_total_counts()


@on_ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_collectives_than_torch(name):
    ours, native_count = counts_of(PROGRAMS[name])
    assert ours <= native_count, (
        f"{name}: {ours} collectives, {native_count} with torch"
    )


# --- what is kept pending is exact, or is reduced first

SPECIAL = [
    torch.tensor([1.0, NAN, -INF, INF, -INF, 3.0, -2.5, 0.0]),
    torch.tensor([NAN, 2.0, 5.0, -INF, -INF, -INF, 4.0, -1.0]),
]
COPY = torch.tensor([1.0, 1.0, INF, -INF, INF, -1.0, NAN, 2.0])
RISING = [
    torch.exp,
    torch.relu,
    torch.ceil,
    torch.tanh,
    torch.sign,
    torch.nan_to_num,
    torch.sqrt,
    torch.erfc,
]
USES = {
    **{function.__name__: function for function in RISING},
    "neg": torch.neg,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1.0, 2.0),
    "a number": lambda x: (x + 2.0, x - INF, 1.0 - x, 0 - x, x + 0, x + 1e300),
    "a scaled number": lambda x: (x.add(1.0, alpha=-2), torch.rsub(x, 3.0, alpha=2)),
    "half": lambda x: x.to(torch.float16),
    "int": lambda x: x.nan_to_num().clamp(-9, 9).to(torch.int32),
}
USES_OF_TWO = {
    "add": torch.add,
    "sub": torch.sub,
    "sub from": lambda x, y: y - x,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "mul": torch.mul,
    "clamp": lambda x, y: x.clamp(y),
}


def line():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def same(name, mine, true):
    for one, expected in zip(results_of(mine), results_of(true), strict=True):
        found = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(
            found, expected, equal_nan=True, msg=lambda m: f"{name}: {m}"
        )


@on_ranks(2)
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize(
    "length", [1, 4000]
)  # one element a time, and more bytes than go by one exchange
def test_a_reduction_that_waits_is_exact(op, length):
    mesh = line()
    parts = [part.repeat(length) for part in SPECIAL]
    value, copy = getattr(torch.stack(parts), f"a{op}")(0), COPY.repeat(length)
    x = DTensor.from_local(parts[mesh.rank], mesh, [Partial(op)])
    y = distribute_tensor(copy, mesh, [Replicate()])
    same("itself", x, value)
    for name, use in USES.items():
        same(name, use(x), use(value))
    for name, use in USES_OF_TWO.items():
        same(name, use(x, y), use(value, copy))
        same(f"{name} of two", use(x, x), use(value, value))
        same(
            f"{name} with finite copies",
            use(x, y.nan_to_num(0, 1, -1)),
            use(value, copy.nan_to_num(0, 1, -1)),
        )


@on_ranks(2)
def test_integers_do_not_overflow_on_the_way():
    mesh, least = line(), torch.iinfo(torch.int32).min
    parts = [
        torch.tensor([least, 3], dtype=torch.int32),
        torch.tensor([5, least], dtype=torch.int32),
    ]
    x = DTensor.from_local(parts[mesh.rank], mesh, [Partial("max")])
    value = torch.tensor([5, 3], dtype=torch.int32)
    uses = [
        torch.neg,
        lambda x: x - 1,
        torch.relu,
        lambda x: torch.maximum(x, x),
        lambda x: x.double(),
    ]
    for number, use in enumerate(uses):
        same(f"use {number}", use(x), use(value))


@on_ranks(2)
def test_what_is_recorded_is_reduced_first():
    mesh = line()
    part = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)[mesh.rank]
    x = DTensor.from_local(part, mesh, [Partial("max")])
    assert (-x).placements == (Partial("min"),)
    weight = distribute_tensor(
        torch.ones(2, dtype=torch.float64), mesh, [Replicate()]
    ).requires_grad_()
    for use in (torch.add, torch.sub, torch.maximum, lambda x, y: y - x):
        with CommunicationLedger(mesh) as ledger:
            found = use(x, weight)
            found.sum().backward()
        assert found.placements == (Replicate(),)
        assert ledger.counts() in (
            {"all_reduce": 1},
            {},
        )  # the value is remembered for the next
    with torch.no_grad():
        assert (x + weight).placements == (Partial("max"),)
    recorded = DTensor.from_local(part.clone().requires_grad_(), mesh, [Partial("max")])
    assert recorded.exp().placements == (Replicate(),)


@on_ranks(4)
def test_pending_on_one_axis_and_sharded_on_another():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    wholes = [draw(5, 3, seed=seed) for seed in range(2)]
    place = mesh.get_coordinate()[0]
    shard = distribute_tensor(wholes[place], mesh, [Replicate(), Shard(0)]).to_local()
    x = DTensor.from_local(shard, mesh, [Partial("max"), Shard(0)], shape=(5, 3))
    value, row = torch.maximum(*wholes), draw(3, seed=7)
    beside = distribute_tensor(row, mesh, [Replicate(), Replicate()])
    cut = distribute_tensor(wholes[0], mesh, [Replicate(), Shard(0)])
    same("neg", -x, -value)
    same("add", x + beside, value + row)
    same("add what is cut", x + cut, value + wholes[0])
    same("maximum", torch.maximum(x, cut).exp(), torch.maximum(value, wholes[0]).exp())
    both = DTensor.from_local(
        shard, mesh, [Partial("max"), Partial("max")], shape=tuple(shard.shape)
    )
    if tuple(shard.shape) == (3, 3):
        assert (-both).placements == (Partial("min"), Partial("min"))


# --- reductions in one message: values that are not finite, ties, uneven and empty shards, both orders of gradients

ROWS = torch.tensor(
    [
        [0.5, -INF, -INF, 2.0, 1.0],
        [-INF, -INF, -INF, -INF, -INF],
        [INF, 1.0, 2.0, -INF, 1000.0],
        [1.0, NAN, 2.0, 3.0, 4.0],
        [-1e308, 1e308, 0.0, 5.0, -3.0],
        [-1000.0, -1001.0, -INF, -1000.0, -999.0],
        [7.0, 7.0, 7.0, 7.0, 7.0],
    ],
    dtype=torch.float64,
)
REDUCTIONS = {
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "topk": lambda x: x.topk(1, -1)[0],
    "max": lambda x: x.max(-1)[0],
    "amin": lambda x: x.amin(-1),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(-1, correction=0),
    "select": lambda x: x[..., 1],
    "slices": lambda x: x[..., 1:2],
}
# Where torch's own results depend on the way in which infinities meet, or on which of several equal ones it takes.
ALL = slice(None)
ROWS_OF = {"std": [3, 6], "var": [3, 6], "amin": [4, 6], "topk": [0, 2, 3, 4]}


@on_ranks(4)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_in_one_message_are_exact(name):
    call = REDUCTIONS[name]
    for shape, placements in (
        ((4,), [Shard(1)]),
        ((2, 2), [Shard(1), Shard(1)]),
        ((2, 2), [Shard(0), Shard(1)]),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])
        for data in (
            ROWS[ROWS_OF.get(name, ALL)],
            draw(6, 5),
            draw(3, 16),
        ):  # five over four ranks: 2, 2, 1 and none
            true = data.clone().requires_grad_()
            mine = distribute_tensor(data, mesh, placements).requires_grad_()
            found, expected = call(mine), call(true)
            same(name, found.detach(), expected.detach())
            weight = draw(*expected.shape, seed=3)
            first = torch.autograd.grad(
                (expected * weight).sum(), true, create_graph=True
            )[0]
            spread = distribute_tensor(weight, mesh, [Replicate()] * len(shape))
            own = torch.autograd.grad((found * spread).sum(), mine, create_graph=True)[
                0
            ]
            assert own.placements == tuple(placements)
            same(f"{name}, gradient", own.detach(), first.detach())
            if (
                bool(data.isfinite().all())
                and first.requires_grad
                and data.abs().max() < 100
            ):
                second = torch.autograd.grad((first**2).sum(), true)[0]
                same(
                    f"{name}, second order",
                    torch.autograd.grad((own**2).sum(), mine)[0],
                    second,
                )


@on_ranks(2)
def test_places_are_exact_in_every_dtype():
    mesh = line()
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.int64,
        torch.int8,
        torch.uint8,
    ):
        data = (draw(3, 300).abs() * 40).to(dtype)
        data[1, 250] = 120  # a place that half precision cannot tell from its neighbour
        data[2] = 1
        x = distribute_tensor(data, mesh, [Shard(1)])
        same(f"max of {dtype}", x.max(1)[0], data.max(1)[0])
        assert (x.max(1)[1].full_tensor()[:2] == data.max(1)[1][:2]).all()
        values, places = x.topk(2, 1)
        same(f"topk of {dtype}", values, data.topk(2, 1)[0])
        assert torch.equal(data.gather(1, places.full_tensor()), values.full_tensor())
    big = torch.tensor([[2**62 + 1, 2**62 + 3, 2**62 + 2, 5]])
    same(
        "large integers",
        distribute_tensor(big, mesh, [Shard(1)]).max(1)[0],
        big.max(1)[0],
    )


@on_ranks(2)
def test_deviations_of_numbers_far_from_zero():
    mesh = line()
    data = (draw(4, 1000) + 1e4).float()
    x = distribute_tensor(data, mesh, [Shard(1)])
    exact = data.double().std(1)
    assert ((x.std(1).full_tensor() - exact) / exact).abs().max() < 1e-6
    values = distribute_tensor(
        draw(3, 1), mesh, [Shard(1)]
    )  # one element, on the first rank
    assert values.std(1).full_tensor().isnan().all()
    assert values.var(1, correction=0).full_tensor().eq(0).all()


@on_ranks(2)
def test_a_small_part_is_a_view_as_others_are():
    mesh = line()
    data = draw(8, 3)
    data[3, 1] = -0.0
    x = distribute_tensor(data, mesh, [Shard(0)])
    part = x[3]
    assert part.placements == (Replicate(),)
    assert torch.equal(part.full_tensor().signbit(), data[3].signbit())
    x.mul_(2)
    same("a view follows its base", part, data[3] * 2)
    with pytest.raises(OperatorError, match="it is a copy"):
        part.add_(1)
    cases = {
        "negative": lambda t: t[-1],
        "step": lambda t: t[1:8:5],
        "new dim": lambda t: t[None, 6:8, 1],
        "narrow": lambda t: t.narrow(0, 3, 2),
        "select": lambda t: t.select(0, -2),
        "nothing": lambda t: t[2:2],
    }
    for name, take in cases.items():
        same(name, take(x), take(data * 2))
    with pytest.raises(IndexError, match="out of bounds"):
        x[8]
    with explicit(), pytest.raises(OperatorError, match="explicit mode"):
        x[3]
