# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel ops``: the operators that have rules, what a rule allows, and a check of a rule of one's own.

It exits with 1 where a checked rule is wrong, with 2 where there is no such operator or it cannot be checked.
"""

from __future__ import annotations

import ast
import difflib
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.decisions import describe_decision
from hyper_parallel.cli.doctor import Framework
from hyper_parallel.cli.failures import WRONG, BadInputError, Debug, told

if TYPE_CHECKING:
    from hyper_parallel.core.shard.ops import Operator
    from hyper_parallel.core.shard.rule import Rule

_EPILOG = """
Examples:

    hyper-parallel ops

    hyper-parallel ops softmax

    hyper-parallel ops matmul --operands '8,16:S(1) 16,4:R' --mesh tp=2

    hyper-parallel ops --check my_ops.py:SwigluRule

    hyper-parallel ops --check my_ops.py:SwigluRule --shapes '5,3 5,3'
"""

_WAYS = {
    "rule": "one rule",
    "by arguments": "a rule that depends on the arguments",
    "by others": "done by other operators",
    "by itself": "done by a function of its own, without a rule",
}


@application.command(epilog=_EPILOG)
@told
def ops(
    name: Annotated[
        str | None,
        typer.Argument(help="An operator, as the framework or a rule calls it."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Check the rule of a DistributedOp, DFunction or function.",
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="For --check: those of its operands, as '5,3 5,3'; else chosen by its rule."
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME=VALUE",
            help="For --check and --operands: further arguments of the call.",
        ),
    ] = None,
    operands: Annotated[
        str | None,
        typer.Option(
            help="Decide a call on operands of these shapes and placements, as '8,16:S(1) 16,4:R'; nothing is run."
        ),
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="For --operands: the axes and their sizes.")
    ] = "tp=2",
    framework: Annotated[
        Framework | None,
        typer.Option(help="Whose operators; else those of the one that is there."),
    ] = None,
    debug: Debug = False,  # noqa: ARG001 - for the decorator
) -> None:
    """Tells which operators have rules, what a rule allows, and whether a rule of your own is right."""
    if framework is not None:
        os.environ["HYPER_PARALLEL_PLATFORM"] = framework.value
    if check is not None:
        if name is not None:
            raise BadInputError("give the name of an operator or --check, not both")
        _check(check, shapes, given or [])
        return
    if operands is not None:
        if name is None:
            raise BadInputError("--operands needs the name of an operator")
        operator = _canonical(name, _operators())
        lines: Iterable[str] = describe_decision(operator, operands, mesh, given or [])
    else:
        lines = _listed() if name is None else _described(name)
    for line in lines:
        typer.echo(line)


def _operators() -> dict[str, Operator]:
    from hyper_parallel.core.shard.ops import OPERATORS

    return OPERATORS


# --- all of them


def _listed() -> Iterator[str]:
    from hyper_parallel.platform import get_platform

    operators = _operators()
    families: dict[str, list[str]] = {}
    counts = dict.fromkeys(_WAYS, 0)
    for name, op in operators.items():
        families.setdefault(op.family.rpartition(".")[2], []).append(name)
        counts[_way(op)] += 1
    yield f"{len(operators)} operators of {get_platform().platform_type.value}:"
    yield from (f"  {count:>4}  {_WAYS[way]}" for way, count in counts.items())
    for family, names in sorted(families.items()):
        yield ""
        yield f"{family.replace('_', ' ')} ({len(names)})"
        yield from textwrap.wrap(
            " ".join(sorted(names)), 116, initial_indent="  ", subsequent_indent="  "
        )
    yield ""
    yield "any other operator runs on whole tensors, with a warning; `hyper-parallel ops NAME` shows a rule"


def _way(op: Operator) -> str:
    from hyper_parallel.core.shard.rule import Rule

    if op.rule is None:
        return "by itself" if op.direct is not None else "by others"
    return "rule" if isinstance(op.rule, Rule) else "by arguments"


# --- one of them


def _described(asked: str) -> Iterator[str]:
    operators = _operators()
    name = _canonical(asked, operators)
    op = operators[name]
    yield f"{name}({_signature(op)})" + (
        f"     ({asked} is another name of it)" if name != asked else ""
    )
    yield f"  family      {op.family.rpartition('.')[2].replace('_', ' ')}"
    spelled = _spelled(name)
    if spelled:
        yield from textwrap.wrap(
            ", ".join(spelled),
            116,
            initial_indent="  called as   ",
            subsequent_indent=" " * 14,
        )
    way = _way(op)
    if way in ("by others", "by itself"):
        yield f"  {_WAYS[way]}"
        return
    rules = list(dict.fromkeys(_rules(op)))
    if way == "by arguments":
        yield f"  {_WAYS[way]}" + (
            "; for some of them:" if rules else "; none could be guessed"
        )
    for rule in rules:
        yield from _explained(rule)
    if op.local is not None:
        yield "  on a shard it runs a function of its own, which is told where the shard lies"


def _canonical(asked: str, operators: Mapping[str, Operator]) -> str:
    """The name in the rules of an operator that is called by any name."""
    from hyper_parallel.platform import get_platform

    platform = get_platform()
    last = _plain_name(asked)
    for name in (asked, last):
        if name in operators:
            return name
    try:
        name = platform.op_name_of(platform.operator(last)).name
    except (AttributeError, KeyError, TypeError):
        name = ""
    if name in operators:
        return name
    if name:
        raise BadInputError(
            f"{asked} has no rule, so it runs on whole tensors, with a warning; to give it one see "
            "docs/add-an-operator.md, to run it on shards custom_shard()"
        )
    longer = sorted(one for one in operators if last and last in one)
    near = longer[:5] or difflib.get_close_matches(
        last.lower(), operators, 5, cutoff=0.7
    )
    meant = f"; did you mean {', '.join(near)}?" if near else ""
    mine = platform.platform_type.value
    other = next(one.value for one in Framework if one.value != mine)
    raise BadInputError(
        f"{asked} is no operator that is known here{meant} (of {mine}; --framework {other} asks for those of {other})"
    )


def _plain_name(asked: str) -> str:
    """The last part of a name such as torch.softmax, or the name of an aten operator without its overload."""
    parts = asked.split(".")
    if "aten" in parts[:-1]:
        return parts[parts.index("aten") + 1]
    return parts[-1]


def _signature(op: Operator) -> str:
    starred = {op.rest: f"*{op.rest}"} if op.rest else {}
    named = [
        f"{starred.get(name, name)}={op.defaults[name]!r}"
        if name in op.defaults
        else starred.get(name, name)
        for name in op.parameters
    ]
    only = [
        f"{name}={value!r}"
        for name, value in op.defaults.items()
        if name not in op.parameters
    ]
    return ", ".join(named + (["*", *only] if only and not op.rest else only))


def _spelled(name: str) -> list[str]:
    """The methods of tensors that are this operator."""
    from hyper_parallel.platform import get_platform

    platform = get_platform()
    found = []
    for method in dir(platform.Tensor):
        try:
            if platform.op_name_of(getattr(platform.Tensor, method)).name == name:
                found.append(f"Tensor.{method}")
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # no operator
    try:
        function = platform.operator(name)
        where = getattr(function, "__module__", None) or ""
        if (
            where
            and not where.startswith(("hyper_parallel", "torch._C"))
            and f"Tensor.{name}" not in found
        ):
            found.insert(0, f"{where}.{getattr(function, '__name__', name)}")
    except AttributeError:
        pass
    return found


def _explained(rule: Rule) -> Iterator[str]:
    """What a rule allows, in words."""
    yield f"  rule        {rule}"
    factors = dict.fromkeys(
        factor for operand in rule.notation.operands for factor in operand.factors
    )
    for factor in factors:
        shown = "other dims" if factor == "..." else factor
        yield f"    {shown:<12}{_explain_factor(rule, factor)}"
    yield from _explain_pending(rule)


def _explain_factor(rule: Rule, factor: str) -> str:
    """How the dims of a factor may be sharded."""
    mark = rule.notation.marks.get(factor, "")
    if mark == "!":
        return "must be whole: it is gathered where it is cut"
    if mark == "@":
        return "may be cut: what a rank does not have counts as zero, and the result is a pending sum"
    if any(factor in result.factors for result in rule.notation.results):
        return "may be cut, and the result is cut there"
    return f"may be cut, and the result is a pending {rule.reduce}"


def _explain_pending(rule: Rule) -> Iterator[str]:
    """In which operands a reduction may be pending."""
    groups = [
        " and ".join(f"operand {i}" for i in group) + " together" * (len(group) > 1)
        for group in rule.linear
    ]
    kinds = " or ".join(rule.carries)
    passes = (
        f"a pending {kinds} passes in {'; or in '.join(groups)}"
        if groups
        else "nothing: it is reduced first"
    )
    yield f"    {'pending':<12}{passes}"
    for order in rule.orders:
        having = " and ".join(f"operand {i}" for i in order.operands)
        becomes = "" if order.result == order.op else f" as a {order.result}"
        yield f"    {'':<12}a pending {order.op} passes in {having}{becomes} while no gradient is recorded"


# --- the rules of an operator whose rule depends on its arguments


def _rules(op: Operator) -> Iterator[Rule]:
    """Its rule, or those for some arguments that are guessed."""
    from hyper_parallel.core.shard.ops import RuleForCall
    from hyper_parallel.core.shard.rule import Rule

    if isinstance(op.rule, Rule):
        yield op.rule
        return
    assert op.rule is not None
    for arguments in _guesses(op):
        try:
            found = op.rule(**arguments)
        except Exception:  # noqa: BLE001, S112 - these arguments do not fit; others may
            continue
        if isinstance(found, (Rule, RuleForCall)):
            yield found if isinstance(found, Rule) else found.rule


def _guesses(op: Operator) -> Iterator[dict[str, Any]]:
    """Arguments that many operators take: a tensor first, sizes and dims for what is called so, the defaults."""
    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.placement_types import Replicate
    from hyper_parallel.platform import get_platform

    whole = Layout((2,), ("axis",))([Replicate()])
    for shape in ((4, 6), (2, 4, 6), (2, 4, 6, 8)):

        def tensor(shape: tuple[int, ...] = shape) -> Any:
            return DTensor(get_platform().zeros(shape), whole.bind(len(shape)), shape)

        likely = {
            "dim": -1,
            "dims": (-1,),
            "dim0": 0,
            "dim1": 1,
            "normalized_shape": (shape[-1],),
            "num_groups": 2,
        }
        needed = {
            name: likely[name] if name in likely else tensor()
            for name in op.parameters
            if name != op.rest
        }
        yield {**needed, **op.defaults}
        yield {
            **needed,
            **op.defaults,
            **{name: value for name, value in likely.items() if name in op.defaults},
        }


# --- a rule of one's own


def _check(what: str, shapes: str | None, given: Sequence[str]) -> None:
    call, op = _called(what)
    arguments = dict(_assignment(text) for text in given)
    operands = _operands(op, shapes)
    from hyper_parallel.testing import check_rule
    from hyper_parallel.testing.rules.check import MESHES

    def with_arguments(*tensors: Any) -> Any:
        # What autograd functions take has no names.
        return (
            call(*tensors, *arguments.values())
            if _is_applied(call)
            else call(*tensors, **arguments)
        )

    told_shapes = ", ".join(str(tuple(x.shape)) for x in operands)
    try:
        count = check_rule(with_arguments, *operands)
    except AssertionError as error:
        typer.echo(f"wrong: {error}")
        typer.echo(f"on operands of shapes {told_shapes}")
        raise typer.Exit(WRONG) from None
    except (TypeError, ValueError) as error:
        raise BadInputError(
            f"{what} cannot be checked with operands of shapes {told_shapes}: {error}"
        ) from error
    if not count:
        raise BadInputError(
            f"{what}: the rule allows nothing that could be compared on shapes {told_shapes}"
        )
    name = f"{op.name}: {op.rule}" if op is not None else what
    typer.echo(f"right: {name}")
    typer.echo(
        f"{count} comparisons held on meshes {', '.join(map(str, MESHES))}, operands of shapes {told_shapes}"
    )


def _called(what: str) -> tuple[Callable[..., Any], Operator | None]:
    """What is called, and its entry in the table if that is known before."""
    from hyper_parallel.core.shard import DFunction, DistributedOp
    from hyper_parallel.platform import get_platform

    operators = _operators()
    before = dict(operators)
    module, name = _loaded(what)
    found = getattr(module, name)
    new = {key: op for key, op in operators.items() if before.get(key) is not op}
    if isinstance(found, type) and issubclass(found, DFunction):
        return found.apply, operators.get(str(found._op_name))
    kind = found if isinstance(found, type) else type(found)
    if not issubclass(kind, DistributedOp):
        if not callable(found):
            raise BadInputError(
                f"{what} is no DistributedOp, no DFunction and no function, but {found!r}"
            )
        return found, None
    op = _registered(what, found, kind, new)
    functions = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, DFunction)
    ]
    for function in functions:
        if function._op_name == op.name:
            return function.apply, op
    try:
        return get_platform().operator(op.name), op
    except AttributeError:
        raise BadInputError(
            f"{what}: {op.name} is no operator of the framework, and no DFunction in the file has _op_name = "
            f"{op.name!r}; give --check a function that calls it on its operands"
        ) from None


def _registered(
    what: str, found: Any, kind: type[Any], new: Mapping[str, Operator]
) -> Operator:
    """The entry that an instance of a DistributedOp has put into the table."""
    if kind.rule is None:
        raise BadInputError(
            f"{what} says what happens to layouts by methods, and has no rule that could be checked; verify() a model "
            "that uses it"
        )
    from hyper_parallel.core.shard.rule import Rule

    rule = Rule(kind.rule) if isinstance(kind.rule, str) else kind.rule
    names = (
        [found.op_name]
        if not isinstance(found, type)
        else [name for name, op in new.items() if op.rule == rule]
    )
    if not names:
        raise BadInputError(
            f"{what}: the file registers it under no name; add {kind.__name__}('name of the operator')"
        )
    if len(names) > 1:
        raise BadInputError(
            f"{what}: {', '.join(names)} have this same rule; give --check the function of one of them"
        )
    return new[names[0]]


def _is_applied(call: Callable[..., Any]) -> bool:
    return getattr(call, "__name__", "") == "apply"


def _loaded(what: str) -> tuple[Any, str]:
    """The module of a file, and the name in it."""
    from pathlib import Path

    from hyper_parallel.ranks.import_file import import_file

    file, _, name = what.rpartition(":")
    if not file or not Path(file).is_file() or Path(file).suffix != ".py":
        raise BadInputError(
            f"--check: expected FILE.py:NAME of a file that is there, got {what!r}"
        )
    module = import_file(file, Path(file).stem)
    if not hasattr(module, name):
        names = [one for one in vars(module) if not one.startswith("_")]
        near = difflib.get_close_matches(name, names, 3)
        raise BadInputError(
            f"--check: {file} has no {name}"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    return module, name


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BadInputError(f"--with: expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


_SIZES = (
    5,
    4,
    3,
    6,
    7,
)  # of factors, in the order in which a rule names them; most do not divide by the ranks


def _operands(op: Operator | None, shapes: str | None) -> list[Any]:
    import numpy as np

    from hyper_parallel.core.shard.rule import Rule

    rng = np.random.default_rng(0)
    rule = op.rule if op is not None and isinstance(op.rule, Rule) else None
    if shapes is not None:
        try:
            wanted = [
                tuple(int(size) for size in part.split(",") if size)
                for part in shapes.split()
            ]
        except ValueError:
            raise BadInputError(
                f"--shapes: expected shapes like '5,3 5,3', got {shapes!r}"
            ) from None
    elif rule is None:
        raise BadInputError(
            "--check: nothing says what operands it takes; give --shapes '5,3 5,3'"
        )
    else:
        wanted = [tuple(shape) for shape in _sample_shapes(rule)]
    read = _indices(rule)
    return [
        rng.integers(0, read[number], shape)
        if number in read
        else rng.standard_normal(shape)
        for number, shape in enumerate(wanted)
    ]


def _sample_shapes(rule: Rule) -> Iterator[list[int]]:
    for operand in rule.notation.operands:
        if operand.listed or any(len(dim.factors) != 1 for dim in operand.dims):
            raise BadInputError(
                f"--check: no shapes can be guessed for {rule}; give --shapes"
            )
        yield [
            size
            for factor in operand.factors
            for size in ((4, 5) if factor == "..." else (_size(rule, factor),))
        ]


def _size(rule: Rule, factor: str) -> int:
    factors = list(
        dict.fromkeys(
            one for operand in rule.notation.operands for one in operand.factors
        )
    )
    return _SIZES[factors.index(factor) % len(_SIZES)]


def _indices(rule: Rule | None) -> dict[int, int]:
    """The operands of a lookup that are indices, with what they must stay below."""
    read = (
        [name for name, mark in rule.notation.marks.items() if mark == "@"]
        if rule is not None
        else []
    )
    if rule is None or not read:
        return {}
    number = {
        i
        for i, operand in enumerate(rule.notation.operands)
        if read[0] not in operand.factors
    }
    return dict.fromkeys(number, _size(rule, read[0]))
