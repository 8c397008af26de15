# SPDX-License-Identifier: Apache-2.0
"""A model in one process and the same in stages on several ranks, and their comparison, for tests on torch."""

import copy

import torch
from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.core.fully_shard import fully_shard
from hyper_parallel.core.pipeline_parallel import (
    PipelineStage,
    SharedParameterInfo,
    get_schedule_class,
)
from hyper_parallel.core.pipeline_parallel.mapping import StageMapping
from hyper_parallel.core.pipeline_parallel.schedules import find_schedule
from hyper_parallel.core.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

DIM = 5


class Layer(nn.Module):
    """A residual layer with a norm and a bias."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Apply(nn.Module):
    """A layer, and a function of it and of what it is given."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.function = function
        self.layer = layer if layer is not None else Layer()

    def forward(self, *args, **kwargs):
        return self.function(self.layer, *args, **kwargs)


class Mlp(nn.Module):
    """A layer whose weights are sharded over an axis."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 6), nn.Linear(6, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def parallel(module, mesh):
    parallelize_module(
        module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    return module


class Block(nn.Module):
    """Two units, one within the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return self.second(self.first(x))


def shard(part, mesh, **options):
    fully_shard(part.first, mesh=mesh, **options)
    return fully_shard(part, mesh=mesh, **options)


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class Head(Embed):
    def forward(self, x):
        return x @ self.weight.t()


def new(*builders):
    """Modules of known weights in float64; a function becomes a layer that it is applied to."""
    torch.manual_seed(0)
    made = [build() if isinstance(build, type) else Apply(build) for build in builders]
    return [module.double() for module in made]


def layers(count):
    return new(*[Layer] * count)


def batch(rows=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn((rows, DIM), generator=generator, dtype=torch.double)
        for _ in range(2)
    ]


def mse(output, target):
    return (output - target).square().mean()


def close(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def as_tuple(tree):
    return tree if isinstance(tree, tuple) else (tree,)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Pair:
    """A chain of modules in one process, and copies of them as stages on all ranks of a group.

    ``options(stage, module)`` are those of a stage; ``skips`` are pairs of stages.
    """

    def __init__(
        self,
        parts,
        schedule="1F1B",
        micros=3,
        loss=mse,
        options=lambda stage, part: {},
        skips=(),
        group=None,
        pipe=lambda part: part,
        **others,
    ):
        self.alone, self.micros, self.loss, self.skips = parts, micros, loss, skips
        self.ranks = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)
        self.piped = [pipe(copy.deepcopy(part)) for part in parts]
        _, kind = find_schedule(schedule)
        self.mapping = StageMapping(kind.style, self.ranks, len(parts), micros)
        self.stages = [
            PipelineStage(
                self.piped[stage],
                stage,
                len(parts),
                group=group,
                **self._skips_of(stage),
                **options(stage, self.piped[stage]),
            )
            for stage in self.mapping.stages_of(self.rank)
        ]
        self.own = [stage.stage_index for stage in self.stages]
        self.has_last = len(parts) - 1 in self.own
        kind = get_schedule_class(schedule)
        self.schedule = kind(self.stages, micros, loss_fn=loss, **others)

    def _skips_of(self, stage):
        sources = [source for source, target in self.skips if target == stage]
        targets = [target for source, target in self.skips if source == stage]
        return {"src_stage": sources or None, "dst_stage": targets or None}

    def forward_alone(self, *args, **kwargs):
        outputs = []
        for stage, part in enumerate(self.alone):
            sources = [source for source, target in self.skips if target == stage]
            if stage:
                inputs = [outputs[stage - 1], *(outputs[one] for one in sources)]
                args = [leaf for one in inputs for leaf in as_tuple(one)]
            outputs.append(part(*args, **kwargs))
        return outputs[-1]

    def run_alone(self, x, y, scale=None, **kwargs):
        """(outputs, losses) of the micro batches, whose scaled losses' gradients are added up."""
        outputs, losses = [], []
        for one, target in zip(x.chunk(self.micros), y.chunk(self.micros), strict=True):
            output = self.forward_alone(one, **kwargs)
            loss = self.loss(output, target)
            (loss * (1 / self.micros if scale is None else scale)).backward()
            outputs.append(output.detach())
            losses.append(loss.detach())
        return outputs, losses

    def step(self, x, y, **kwargs):
        """One step of both, and the comparison of what they return and of all gradients."""
        outputs, losses = self.run_alone(x, y, **kwargs)
        own = []
        output = self.schedule.step(x, target=y, losses=own, **kwargs)
        if self.has_last:
            close(output, torch.cat(outputs))
            close(own, losses)
        self.check_gradients()

    def check_gradients(self, atol=1e-12):
        for stage in self.own:
            pairs = zip(
                self.piped[stage].named_parameters(),
                self.alone[stage].parameters(),
                strict=True,
            )
            for (name, parameter), other in pairs:
                gradient, expected = parameter.grad, other.grad
                if expected is None:
                    assert gradient is None or not gradient.any(), name
                else:
                    assert gradient is not None, name
                    close(gradient, expected, atol)

    def zero_grad(self):
        for part in [*self.alone, *self.piped]:
            part.zero_grad()


def check_whole_gradients(pair):
    for stage in pair.own:
        for own, other in zip(
            pair.piped[stage].parameters(), pair.alone[stage].parameters(), strict=True
        ):
            close(whole(own.grad), other.grad)


def tied(schedule, count, micros=4, **options):
    """A pair whose first and last stage have one weight; those of the last stage begin with other values."""
    kinds = [Embed, *[Layer] * (count - 2), Head]
    parts = new(*kinds)
    parts[-1].weight = parts[0].weight

    def share(stage, part):
        if stage not in (0, count - 1):
            return {}
        with torch.no_grad():
            part.weight.mul_(1 + stage)  # the first stage has the right values
        info = SharedParameterInfo(part.weight, [0, count - 1])
        return {"shared_parameters": [info]}

    return Pair(parts, schedule, micros, options=share, **options)
