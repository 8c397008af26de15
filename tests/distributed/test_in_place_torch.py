# SPDX-License-Identifier: Apache-2.0
"""Every operator of torch that writes into its arguments, on every kind of layout: right, or refused on all ranks."""

import warnings
from collections import Counter

import pytest
import torch
from thorough import THOROUGH, compare_few_collectives

from hyper_parallel import (
    DTensor,
    FusedShard,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.ops import OPERATORS
from hyper_parallel.core.shard.ops.foreach import OTHERS, UNARY
from hyper_parallel.platform.torch.operators import _FILLS, op_name_of
from hyper_parallel.testing import on_ranks, run_ranks
from tools.operator_sweep import draw_samples

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SEED = 5


def draw(*shape, seed=0):
    return (
        torch.rand(
            *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        + 0.5
    )


def square_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def put(tensor, mesh, placements):
    """The tensor on the mesh; the parts of a pending sum differ from rank to rank."""
    if P not in placements:
        return distribute_tensor(tensor.clone(), mesh, placements)
    axis = placements.index(P)
    others = [R if placement is P else placement for placement in placements]
    rest = distribute_tensor(tensor.clone(), mesh, others).to_local()
    part = rest * 3 if mesh.get_coordinate()[axis] == 0 else rest * -2
    return DTensor.from_local(part, mesh, placements, shape=tensor.shape)


def layouts_of(shape, is_floating):
    """Placements on two axes for a tensor of a shape, with uneven and empty shards where the sizes give some."""
    found = [[R, R]]
    if is_floating:
        found += [[P, R]]
    if not shape:
        return found
    first, last = shape[0], len(shape) - 1
    found += [
        [S0, R],
        [S0, S0],
        [StridedShard(0, 2), S0],
        [S0, Shard(last) if last else R],
    ]
    if first > 1:
        found.insert(1, [FusedShard(0, (1, first - 1)), R])
        found.append([R, FusedShard(0, (1, first - 1))])
    if is_floating:
        found += [[P, S0]]
    return found


def outcome_of(call, target, truth):
    """What a call that changes its target came to: "right", or the error's first words."""
    try:
        call(target)
    except (
        Exception
    ) as error:  # any error will do, as long as it is the same on all ranks
        return f"{type(error).__name__}: {str(error)[:40]}"
    torch.testing.assert_close(
        target.full_tensor(), truth, equal_nan=True, rtol=1e-9, atol=1e-9
    )
    return "right"


def agree(outcomes):
    """An error unless every rank has these outcomes, each with what it is of."""
    everyone = [None] * 4
    get_platform().all_gather_object(everyone, outcomes)
    for others in everyone:
        for mine, other in zip(outcomes, others, strict=True):
            assert mine[1].partition(":")[0] == other[1].partition(":")[0], (
                mine,
                other,
            )


def calls_of(op):
    """An in-place operator as people call it and as torch.ops names it, with samples and the layouts to try."""
    samples = list(samples_of(op))
    for sample in samples:
        yield op.inplace_variant, sample, None
    packet = getattr(torch.ops.aten, f"{op.name.rpartition('.')[2]}_", None)
    if packet is not None and samples:
        yield packet, samples[0], 3


def samples_of(op):
    for number, sample in enumerate(
        draw_samples(op, torch.float64, requires_grad=False)
    ):
        if number == 2:
            return
        operands = (*sample.args, *sample.kwargs.values())
        if all(
            not isinstance(value, (list, tuple)) or not any(map(torch.is_tensor, value))
            for value in operands
        ):
            yield sample


def changed_by(call, sample):
    """What one process gets; None where this caller does not take these arguments, or changes the shape."""
    target = sample.input.clone()
    try:
        torch.default_generator.manual_seed(SEED)
        call(target, *sample.args, **sample.kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None
    return target if target.shape == sample.input.shape else None


def sweep_in_place(part, parts):
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    mesh, found = square_mesh(), {}
    known = [
        op
        for op in op_db
        if op.inplace_variant is not None and torch.float64 in op.dtypes
    ]
    for number, op in enumerate(known[part::parts]):
        name = op_name_of(op.inplace_variant).name
        if (
            name not in OPERATORS or name in _FILLS
        ):  # what draws numbers has tests of its own
            continue
        with compare_few_collectives():
            outcomes = [
                (f"{op.name} on {placements}", outcome)
                for call, sample, most in calls_of(op)
                for placements, outcome in outcomes_of(call, sample, mesh, most, number)
            ]
        agree(outcomes)
        found[op.name] = Counter(outcome for _, outcome in outcomes)
    return found


def outcomes_of(call, sample, mesh, most, number):
    truth = changed_by(call, sample)
    if truth is None:
        return
    layouts = layouts_of(sample.input.shape, sample.input.is_floating_point())[:most]
    for placements in (
        layouts if THOROUGH else layouts[number % 2 :: 2]
    ):  # every layout with every second operator
        target = put(sample.input, mesh, placements)
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor,
            lambda t: put(t, mesh, [R, R]),
            (tuple(sample.args), dict(sample.kwargs)),
        )
        torch.default_generator.manual_seed(SEED)
        yield (
            str(placements),
            outcome_of(lambda t: call(t, *args, **kwargs), target, truth),  # noqa: B023
        )


# Strides and storages mean nothing for shards on many ranks.
ABOUT_ONE_MEMORY = {"as_strided", "resize_", "resize_as_"}


@pytest.mark.parametrize("part", range(2))
def test_every_operator_in_place(part):
    found = run_ranks(sweep_in_place, 4, part, 2, timeout=300)[0]
    assert len(found) > 50
    never = {
        name for name, outcomes in found.items() if outcomes and not outcomes["right"]
    }
    assert never <= ABOUT_ONE_MEMORY


def loses_a_change(call):
    """A control: the operator on copies, as if what it writes did not come back."""
    return lambda target: call(target.clone())


@on_ranks(4)
def test_a_change_that_is_lost_would_be_seen():
    target = put(draw(5, 3), square_mesh(), [S0, R])
    with pytest.raises(AssertionError, match="not close"):
        outcome_of(loses_a_change(torch.Tensor.sqrt_), target, draw(5, 3).sqrt())


# --- lists

# For each entry of the lists its shape and how it lies; None is a plain tensor, which every rank has.
ENTRIES = {
    "sharded": [
        ((5, 3), [S0, R]),
        ((4,), [S0, S0]),
        ((2, 6), [S0, S1]),
        ((1, 2), [R, S0]),
    ],
    "sections and nested": [
        ((5, 4), [FusedShard(0, (2, 3)), R]),
        ((6,), [R, FusedShard(0, (4, 2))]),
        ((7, 2), [StridedShard(0, 2), S0]),
        ((3,), [R, R]),
    ],
    "plain among them": [
        ((5, 3), [S0, R]),
        ((4,), None),
        ((6,), [FusedShard(0, (4, 2)), R]),
        ((2, 2), None),
    ],
    "pending": [((5, 3), [P, R]), ((4,), [P, S0]), ((2, 6), [S0, R]), ((3,), None)],
}
FORMS = {
    "f(x)": lambda f, x, y, z, scalar: f(x),
    "f(x, 1.5)": lambda f, x, y, z, scalar: f(x, 1.5),
    "f(x, scalar)": lambda f, x, y, z, scalar: f(x, scalar),
    "f(x, numbers)": lambda f, x, y, z, scalar: f(
        x, [float(i + 1) for i in range(len(x))]
    ),
    "f(1.5, x)": lambda f, x, y, z, scalar: f(1.5, x),
    "f(x, y)": lambda f, x, y, z, scalar: f(x, y),
    "f(x, y, 0.3)": lambda f, x, y, z, scalar: f(x, y, 0.3),
    "f(x, y, z)": lambda f, x, y, z, scalar: f(x, y, z),
    "f(x, y, z, numbers)": lambda f, x, y, z, scalar: f(
        x, y, z, [float(i + 1) for i in range(len(x))]
    ),
}


def lists_for(entries, mesh):
    plain = [
        [draw(*shape, seed=9 * k + i) for i, (shape, _) in enumerate(entries)]
        for k in range(3)
    ]
    mine = [
        [
            t.clone() if lies is None else put(t, mesh, lies)
            for t, (_, lies) in zip(line, entries, strict=True)
        ]
        for line in plain
    ]
    return plain, mine


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def of_list(call, operands):
    """The result of a call on lists; None where torch does not take these arguments."""
    try:
        found = call(*operands)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return found if found is not None else ()


def same_lists(mine, true, what):
    for one, right in zip(mine, true, strict=True):
        torch.testing.assert_close(
            whole(one),
            right,
            equal_nan=True,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda m: f"{what}: {m}",
        )


def names_for(kind):
    """The operators that are tried: in CI each on every second kind of lists."""
    names = sorted(name for name in dir(torch) if name.startswith("_foreach_"))
    stems = sorted({name.rstrip("_") for name in names})
    some = stems if THOROUGH else stems[list(ENTRIES).index(kind) % 2 :: 2]
    return [name for name in names if name.rstrip("_") in some]


def sweep_lists(kind):
    mesh, outcomes = square_mesh(), []
    for name in names_for(kind):
        functions = [getattr(torch, name)]
        if (
            kind == "sections and nested"
        ):  # the names lead to the same functions, so one kind shows it
            functions.append(getattr(torch.ops.aten, name))
        for function in functions:
            for form, call in FORMS.items():
                with compare_few_collectives():
                    outcome = outcome_on_lists(
                        kind, mesh, function, call, f"{kind}: {name} as {form}"
                    )
                if outcome is not None:
                    outcomes.append((name, outcome))
    agree(outcomes)
    return outcomes


def outcome_on_lists(kind, mesh, function, call, what):
    number = torch.tensor(0.75, dtype=torch.float64)
    plain, mine = lists_for(ENTRIES[kind], mesh)
    true = of_list(lambda *operands: call(function, *operands), (*plain, number))
    if true is None:
        return None
    scalar = put(number, mesh, [P, R] if kind == "pending" else [R, R])
    try:
        found = call(function, *mine, scalar)
    except (
        Exception
    ) as error:  # any error will do, as long as it is the same on all ranks
        return f"{type(error).__name__}: {str(error)[:60]}"
    same_lists(
        [t for line in mine for t in line], [t for line in plain for t in line], what
    )
    if not op_name_of(function).inplace:
        same_lists(found, true, what)
    return "right"


@pytest.mark.parametrize("kind", ENTRIES)
def test_every_operator_on_lists(kind):
    outcomes = run_ranks(sweep_lists, 4, kind, timeout=300)[0]
    right = {name for name, outcome in outcomes if outcome == "right"}
    ruled = {f"_foreach_{name}" for name in (*UNARY.split(), *OTHERS.split())}
    assert ruled & set(names_for(kind)) <= right


# --- steps of optimizers, scalers and clipping


def leaves_for(entries, mesh):
    plain, mine = lists_for(entries, mesh)
    return [[torch.nn.Parameter(t) for t in side[0]] for side in (plain, mine)]


def loss_of(parameters):
    return sum(
        (whole((p.sin() * 0.3 + p.pow(2)).sum()) for p in parameters),
        start=torch.zeros(()),
    )


KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ("foreach", "fused", None)),
    "AdamW": (
        torch.optim.AdamW,
        {"lr": 0.1, "amsgrad": True},
        ("foreach", "fused", None),
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, ("foreach", "fused")),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}, ("foreach",)),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}, ("foreach",)),
}


@on_ranks(4)
def test_optimizers_and_clipping_over_plain_and_distributed_parameters():
    mesh = square_mesh()
    for kind in ("sections and nested", "plain among them"):
        for make, options, ways in KINDS.values():
            for way in ways:
                sides = leaves_for(ENTRIES[kind], mesh)
                norms = []
                for parameters in sides:
                    flags = {"foreach": False} if way is None else {way: True}
                    optimizer = make(parameters, **options, **flags)
                    for _ in range(3):
                        optimizer.zero_grad()
                        loss_of(parameters).backward()
                        for foreach in (True, False, None):
                            norms.append(
                                whole(
                                    torch.nn.utils.clip_grad_norm_(
                                        parameters, 0.5, foreach=foreach
                                    )
                                )
                            )
                        optimizer.step()
                same_lists(sides[1], sides[0], f"{make.__name__} {way} {kind}")
                torch.testing.assert_close(
                    torch.stack(norms[9:]), torch.stack(norms[:9])
                )
                assert norms[0] > 0.5


@on_ranks(4)
def test_a_scaler_unscales_every_gradient():
    mesh = square_mesh()
    for kind in ("sharded", "sections and nested", "plain among them"):
        for broken in (False, True):
            sides = leaves_for(ENTRIES[kind], mesh)
            for parameters in sides:
                optimizer = torch.optim.SGD(parameters, lr=0.1)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                scaler.scale(
                    loss_of(parameters) * (float("inf") if broken else 1.0)
                ).backward()
                gathered = [
                    whole(p.grad) for p in parameters
                ]  # what is gathered before must not be handed out after
                scaler.unscale_(optimizer)
                assert len(gathered) == len(parameters)
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == (512.0 if broken else 1024.0)
            same_lists([p.grad for p in sides[1]], [p.grad for p in sides[0]], kind)
            same_lists(sides[1], sides[0], kind)


@on_ranks(4)
def test_a_fused_step_through_torch_ops():
    mesh = square_mesh()
    options = {
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    for kind in ("sections and nested", "plain among them"):
        sides = lists_for(ENTRIES[kind], mesh)
        for call, rate in (
            (torch.ops.aten._fused_adamw_, 0.1),
            (torch.ops.aten._fused_adamw_.default, 0.1),
            (torch.ops.aten._fused_adamw_.tensor_lr, torch.tensor(0.1)),
            (torch.ops.aten._fused_adam_, 0.1),
        ):
            for x, y, z in sides:
                squares = torch._foreach_clone(z)
                steps = [torch.tensor(1.0) for _ in x]
                call(list(x), list(y), list(z), squares, [], steps, lr=rate, **options)
        for mine, true in zip(sides[1], sides[0], strict=True):
            same_lists(mine, true, kind)


@on_ranks(4)
def test_what_meets_at_one_index_must_lie_alike():
    mesh = square_mesh()
    (x, y, _), (mine, other, _) = lists_for(ENTRIES["sharded"], mesh)
    before = [t.to_local().clone() for t in mine]
    with pytest.raises(
        OperatorError, match=r"_foreach_add_: at index 0 a plain tensor meets .*HP304"
    ):
        torch._foreach_add_(mine, y)
    with pytest.raises(
        OperatorError, match=r"_fused_sgd_: at index 1 a plain tensor meets"
    ):
        torch._fused_sgd_(
            mine, [other[0], y[1], other[2], other[3]], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip
    assert all(
        torch.equal(t.to_local(), old) for t, old in zip(mine, before, strict=True)
    )
    with pytest.raises(OperatorError, match="HP304"):
        x[0] * mine[0]
    number = distribute_tensor(torch.tensor(2.0, dtype=torch.float64), mesh, [R, R])
    assert torch.equal(x[0].clone().mul_(number), x[0] * 2)


@on_ranks(4)
def test_the_gradient_of_a_number_that_multiplies_lists():
    mesh = square_mesh()
    plain, mine = lists_for(ENTRIES["sharded"], mesh)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    twin = distribute_tensor(scale.detach().clone(), mesh, [R, R]).requires_grad_()
    sum((t * scale).sum() for t in plain[0]).backward()
    sum(t.sum().full_tensor() for t in torch._foreach_mul(mine[0], twin)).backward()
    torch.testing.assert_close(twin.grad.full_tensor(), scale.grad)
