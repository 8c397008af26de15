# SPDX-License-Identifier: Apache-2.0
"""Draws random programs on tensors that plain torch runs: lines of Python, each tried before the next is drawn.

    a = leaf(0, (4, 3), 5)          values number 0; where they are distributed, in the layout number 5
    b = a.sin()
    c = b[1:3]
    b.mul_(2.0)
    hook(c, 3.0)

A line that plain torch refuses is left out, so that the shapes, views and graphs of a program are those of torch.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

SIZES = (1, 1, 2, 2, 3, 4, 5)
LAYOUTS = 64  # numbers of layouts, which a mesh maps to its own
LARGEST = 400  # elements of a tensor


def values_of(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The values of a leaf: none near zero or alike, where a kink or a tie would be."""
    generator = torch.Generator().manual_seed(number)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.3
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return drawn * signs


def is_usable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of numbers with a graph that torch has not given up."""
    try:
        return tensor.is_floating_point() and tensor.is_leaf in (True, False)
    except RuntimeError:  # one of several views whose base was changed
        return False


class Plain:
    """What the lines of a program call, on plain tensors."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.seen: list[Any] = []

    def names(self) -> dict[str, Any]:
        """The functions that lines may call."""
        return {
            "F": F,
            "hook": self.hook,
            "integers": self.integers,
            "leaf": self.leaf,
            "move": self.move,
            "torch": torch,
        }

    def leaf(self, number: int, shape: tuple[int, ...], layout: int) -> Any:  # noqa: ARG002 - for those on a mesh
        """A leaf that requires a gradient."""
        self.leaves.append(values_of(number, shape).requires_grad_())
        return self.leaves[-1]

    def integers(self, number: int, shape: tuple[int, ...], high: int) -> Any:
        """Indices."""
        return torch.randint(
            0, high, shape, generator=torch.Generator().manual_seed(number)
        )

    def move(self, tensor: Any, layout: int) -> Any:  # noqa: ARG002 - for those on a mesh
        """The tensor in another layout, as one of its own."""
        return tensor.clone()

    def hook(self, tensor: Any, factor: float) -> None:
        """Has a hook note the gradient and change it."""
        seen: list[Any] = []
        self.seen.append(seen)
        _ = tensor.grad_fn  # torch crashes in the hook of a view if nobody has asked since its base was changed
        tensor.register_hook(lambda g: seen.append(g.detach()) or g * factor)


class Drawing:
    """One program while it is drawn."""

    def __init__(self, seed: int, length: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.plain = Plain()
        self.namespace = self.plain.names()
        self._count = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._try(self.leaf())
            for _ in range(200):
                if len(self.lines) >= length:
                    break
                self._try(self.rng.choices(STATEMENTS, WEIGHTS)[0](self))

    def _try(self, line: str | None) -> None:
        if line is None:
            return
        try:
            exec(line, self.namespace)  # noqa: S102 - a line of our own
        except (RuntimeError, IndexError, ValueError, TypeError):
            return
        name = line.partition(" = ")[0]
        made = self.namespace.get(name)
        if isinstance(made, torch.Tensor) and (
            made.numel() > LARGEST or made.dim() > 4 or not made.isfinite().all()
        ):
            return
        self.lines.append(line)

    # --- names and numbers

    def new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def tensors(self, want: Callable[[Any], bool]) -> list[str]:
        used = {line.partition(" = ")[0] for line in self.lines}
        found = [name for name in self.namespace if name in used]
        return [
            name
            for name in found
            if is_usable(self.namespace[name]) and want(self.namespace[name])
        ]

    def pick(self, want: Callable[[Any], bool] = torch.is_tensor) -> str | None:
        names = self.tensors(want)
        if not names:
            return None
        recent = names[-4:]
        return self.rng.choice(recent if self.rng.random() < 0.7 else names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.namespace[name].shape)

    def dim(self, name: str) -> int:
        return self.rng.randrange(max(1, len(self.shape(name))))

    def layout(self) -> int:
        return self.rng.randrange(LAYOUTS)

    def number(self) -> float:
        return self.rng.choice([-1.5, 0.5, 2.0, 3.0])

    # --- statements: each gives a line, or None where there is nothing to do it to

    def leaf(self, shape: tuple[int, ...] | None = None) -> str:
        if shape is None:
            shape = tuple(
                self.rng.choice(SIZES) for _ in range(self.rng.choice([1, 2, 2, 2, 3]))
            )
        return f"{self.new()} = leaf({self._count}, {shape}, {self.layout()})"

    def unary(self) -> str | None:
        x = self.pick()
        call = self.rng.choice(
            [
                "sin()",
                "tanh()",
                "square()",
                "relu()",
                "sigmoid()",
                "abs()",
                "neg()",
                "clone()",
                "exp()",
            ]
        )
        return x and f"{self.new()} = {x}.{call}"

    def binary(self) -> str | None:
        x, y = self.pick(), self.pick()
        if x is None or y is None:
            return None
        if self.rng.random() < 0.3:
            y = str(self.number())
            return f"{self.new()} = {x} {self.rng.choice('+-*/')} {y}"
        way = self.rng.choice(
            [
                "{x} + {y}",
                "{x} - {y}",
                "{x} * {y}",
                "torch.maximum({x}, {y})",
                "torch.where({x} > 0, {x}, {y})",
            ]
        )
        return f"{self.new()} = {way.format(x=x, y=y)}"

    def with_new_leaf(self) -> str | None:
        """Beside a leaf of the same shape, or one that broadcasts; the leaf comes first, the rest next time."""
        x = self.pick()
        if x is None:
            return None
        shape = tuple(size if self.rng.random() < 0.7 else 1 for size in self.shape(x))
        return self.leaf(shape)

    def product(self) -> str | None:
        x = self.pick(lambda t: t.dim() >= 1)
        y = self.pick(lambda t: t.dim() == 2)
        return x and y and f"{self.new()} = {x} @ {self.rng.choice([y, f'{y}.t()'])}"

    def reduce(self) -> str | None:
        x = self.pick(lambda t: t.dim() >= 1)
        if x is None:
            return None
        dim = self.rng.choice(
            [str(self.dim(x)), str(self.dim(x)), f"{self.dim(x)}, keepdim=True"]
        )
        call = self.rng.choice(
            [
                f"sum({dim})",
                f"mean({dim})",
                f"amax({dim})",
                f"prod({dim})",
                f"logsumexp({dim})",
                f"norm(dim={dim})",
                "sum()",
            ]
        )
        return f"{self.new()} = {x}.{call}"

    def along(self) -> str | None:
        x = self.pick(lambda t: t.dim() >= 1)
        if x is None:
            return None
        dim = self.dim(x)
        call = self.rng.choice(
            [
                f"softmax({dim})",
                f"cumsum({dim})",
                f"flip({dim})",
                f"roll(1, {dim})",
                f"sort({dim})[0]",
            ]
        )
        return f"{self.new()} = {x}.{call}"

    def view(self) -> str | None:
        x = self.pick(lambda t: t.dim() >= 1)
        if x is None:
            return None
        dim, size = self.dim(x), self.shape(x)[self.dim(x)]
        start = self.rng.randrange(size) if size else 0
        stop = self.rng.randint(start, size)
        call = self.rng.choice(
            [
                f"[{', '.join([':'] * dim + [f'{start}:{stop}'])}]",
                f".narrow({dim}, {start}, {max(0, stop - start)})",
                f".select({dim}, {start})",
                ".view(-1)",
                ".reshape(-1)",
                ".flatten()",
                ".t()",
                ".transpose(0, -1)",
                f".unsqueeze({dim})",
                ".expand(2, *[-1] * 1)",
                f".split(1, {dim})[0]",
                f".chunk(2, {dim})[-1]",
                f".unbind({dim})[0]",
                ".diagonal()",
                ".squeeze()",
                ".detach()",
                "[..., None]",
                "[[0]]",
            ]
        )
        return f"{self.new()} = {x}{call}"

    def in_place(self) -> str | None:
        x = self.pick(lambda t: not t.is_leaf)
        y = self.pick()
        if x is None or y is None:
            return None
        size = self.shape(x)[0] if self.shape(x) else 0
        start = self.rng.randrange(size) if size else 0
        return self.rng.choice(
            [
                f"{x}.add_({self.number()})",
                f"{x}.mul_({self.number()})",
                f"{x}.add_({y})",
                f"{x}.mul_({y})",
                f"{x}.copy_({y})",
                f"{x}.relu_()",
                f"{x}.sigmoid_()",
                f"{x}[{start}:] = {self.number()}",
                f"{x}[{start}] = {y}",
                f"{x}.clamp_(min=-1.0)",
                f"{x}.zero_()",
            ]
        )

    def join(self) -> str | None:
        x = self.pick(lambda t: t.dim() >= 1)
        y = self.pick(lambda t: t.dim() >= 1)
        return (
            x
            and y
            and f"{self.new()} = torch.{self.rng.choice(['cat', 'stack'])}([{x}, {y}, {x}], {self.dim(x)})"
        )

    def network(self) -> str | None:
        x = self.pick(lambda t: t.dim() >= 2)
        if x is None:
            return None
        w = self.pick(lambda t: t.dim() == 2)
        last = self.shape(x)[-1]
        n = self.rng.randrange(1000)
        high = max(1, self.shape(x)[0])
        return self.rng.choice(
            [
                f"{self.new()} = F.linear({x}, {w})" if w else None,
                f"{self.new()} = F.layer_norm({x}, ({last},))",
                f"{self.new()} = F.mse_loss({x}, {w})" if w else None,
                f"{self.new()} = torch.index_select({x}, 0, integers({n}, (3,), {high}))",
                f"{self.new()} = F.embedding(integers({n}, (2, 2), {high}), {x})",
                f"{self.new()} = F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None])",
                f"{self.new()} = F.normalize({x}, dim={self.dim(x)})",
            ]
        )

    def move(self) -> str | None:
        x = self.pick()
        return x and f"{self.new()} = move({x}, {self.layout()})"

    def hook(self) -> str | None:
        x = self.pick(lambda t: t.requires_grad)
        return x and f"hook({x}, {self.number()})"


TABLE = {
    Drawing.leaf: 2,
    Drawing.with_new_leaf: 2,
    Drawing.unary: 4,
    Drawing.binary: 6,
    Drawing.product: 3,
    Drawing.reduce: 4,
    Drawing.along: 2,
    Drawing.view: 5,
    Drawing.in_place: 4,
    Drawing.join: 1,
    Drawing.network: 2,
    Drawing.move: 2,
    Drawing.hook: 1,
}
STATEMENTS, WEIGHTS = list(TABLE), list(TABLE.values())


def draw_program(seed: int) -> list[str]:
    """The lines of a program."""
    return Drawing(seed, length=random.Random(seed).randint(4, 14)).lines
