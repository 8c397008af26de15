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
from hyper_parallel import init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks

INF, NAN = float("inf"), float("nan")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
        placed = self.module.Shard(int(placement[1:])) if shards else self.module.Replicate()
        return self.module.distribute_tensor(data.clone(), self.mesh, [placed]).requires_grad_(recorded)

    def pending(self, op, seed=0):
        """A tensor of which every rank has a part."""
        parts = [draw(5, 3, seed=10 * seed + rank) for rank in range(torch.distributed.get_world_size())]
        if self.module is None:
            return getattr(torch.stack(parts), f"a{op}")(0)
        part = parts[torch.distributed.get_rank()]
        return self.module.DTensor.from_local(part, self.mesh, [self.module.Partial(op)])


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
    return Program(lambda library: [library.put(draw(*shape), placement, recorded)], run)


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
        placed = {name: library.put(draw(*p.shape, seed=i + 1), "R", True) for i, (name, p) in enumerate(parameters)}
        module = layer()
        for name, value in placed.items():
            module.register_parameter(name, torch.nn.Parameter(value.detach()))
        return [module, library.put(data, placement), torch.optim.SGD(module.parameters(), 0.01)]

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
    "a chain on maxima": pointwise(lambda x, y: torch.maximum(x.exp(), y + 1.0).neg(), "max", "max"),
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
    "a step of a convolution": trained(lambda: torch.nn.Conv2d(3, 4, 3, padding=1), draw(4, 3, 5, 5), "S0"),
    "a step of a layer norm": trained(lambda: torch.nn.LayerNorm(6), draw(2, 8, 6), "S1"),
    "a step of an RMS norm": trained(lambda: torch.nn.RMSNorm(6), draw(2, 8, 6), "S1"),
}


def results_of(found):
    return list(found) if isinstance(found, (list, tuple)) else [found]


def whole(value):
    return value.full_tensor().detach()


def counts_of(program):
    """(ours, torch's) collectives, after both sets of values have been compared with those of plain torch."""
    ranks = torch.distributed.get_world_size()
    ours = Library(hyper_parallel, init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",)))
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
        torch.testing.assert_close(whole(theirs_), true.detach())  # a control: it is the same program
    return sum(ledger.counts().values()), comm.get_total_counts()


@on_ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_collectives_than_torch(name):
    ours, native_count = counts_of(PROGRAMS[name])
    assert ours <= native_count, f"{name}: {ours} collectives, {native_count} with torch"
