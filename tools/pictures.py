# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/pictures.md into docs/pictures/; ``make docs`` runs it.

Each is a card with a background of its own, light or dark as the reader's system is, so that it is readable wherever
it is shown. A colour means a piece of a tensor: the same colour is the same numbers.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from hyper_parallel.core.pipeline_parallel.picture import COLORS, draw_svg
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.simulate import simulate

FOLDER = Path(__file__).resolve().parents[1] / "docs/pictures"

STYLE = """
text { font: 15px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
.small { font-size: 13px; } .bold { font-weight: 600; }
.mono { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
.card { fill: var(--card); stroke: var(--edge); }
.box { stroke: var(--ink); stroke-width: 1.2; }
.plain { fill: var(--plain); } .none { fill: none; }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); }
.dashed { stroke-dasharray: 6 4; }
.line { stroke: var(--ink); stroke-width: 1.6; fill: none; }
.tip { fill: var(--ink); }
svg { --ink: #1b1f27; --card: #ffffff; --edge: #c9ced8; --plain: #eef0f4;
  --a: #a9c8ff; --b: #ffcf99; --c: #b5e3b5; --d: #e2c0f0; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e9ebf1; --card: #1f232c; --edge: #4a5060; --plain: #323846;
    --a: #2c5596; --b: #8d5513; --c: #2d6b37; --d: #6b3f84; }
}
"""


class Picture:
    """Boxes, words and arrows on a card."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, kind: str = "plain", *lines: str
    ) -> None:
        """A box with lines of text in its middle."""
        self.parts.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5"/>'
        )
        for number, line in enumerate(lines):
            self.text(
                x + w / 2, y + h / 2 + 5 + 18 * (number - (len(lines) - 1) / 2), line
            )

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle"
    ) -> None:
        """Words, by default around x."""
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, kind: str = ""
    ) -> None:
        """An arrow, which points to its end."""
        self.parts.append(
            f'<path class="line {kind}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#tip)"/>'
        )

    def upright(self, x: float, y: float, h: float, words: str, kind: str) -> None:
        """A bar with words that go upwards: a collective, which all ranks of a line do together."""
        self.parts.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="30" height="{h:g}" rx="5"/>'
        )
        middle = f"{x + 20:g} {y + h / 2:g}"
        self.parts.append(
            f'<text text-anchor="middle" transform="translate({middle}) rotate(-90)">{escape(words)}</text>'
        )

    def grid(self, x: float, y: float, cells: list[str], side: float = 22) -> None:
        """A small tensor: a letter is a colour, a dot an element that this rank does not have."""
        for row, line in enumerate(cells):
            for column, letter in enumerate(line):
                kind = "none dashed" if letter == "." else letter
                self.parts.append(
                    f'<rect class="box {kind}" x="{x + side * column:g}" y="{y + side * row:g}" '
                    f'width="{side:g}" height="{side:g}"/>'
                )

    def svg(self) -> str:
        """The whole file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n"
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto"><path class="tip" d="M0 0L10 5L0 10z"/></marker></defs>\n'
            f'<rect class="card" x=".5" y=".5" width="{self.width - 1}" height="{self.height - 1}" rx="8"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def mesh() -> Picture:
    """Eight ranks as two rows of four."""
    p = Picture("Eight ranks on a mesh of two axes: dp has 2, tp has 4", 640, 300)
    for tp in range(4):
        p.text(195 + 112 * tp, 34, f"tp {tp}")
    for dp in range(2):
        p.text(60, 90 + 92 * dp, f"dp {dp}")
        for tp in range(4):
            p.box(
                145 + 112 * tp, 56 + 92 * dp, 100, 58, "ac"[dp], f"rank {4 * dp + tp}"
            )
    p.box(130, 45, 458, 80, "none dashed")
    p.box(138, 49, 114, 172, "none dashed")
    p.text(320, 250, "a row: the four ranks of a tp line cut each layer between them")
    p.text(
        320,
        275,
        "a column: the two ranks of a dp line share a batch, and have copies of the weights",
    )
    return p


def placements() -> Picture:
    """What two ranks have of a 4 x 4 tensor."""
    p = Picture(
        "Shard(0), Shard(1), Replicate() and Partial() of a tensor on two ranks",
        660,
        345,
    )
    kinds = [
        (
            "Shard(0)",
            "rows are cut",
            ["aaaa", "aaaa", "....", "...."],
            ["....", "....", "bbbb", "bbbb"],
        ),
        (
            "Shard(1)",
            "columns are cut",
            ["aa..", "aa..", "aa..", "aa.."],
            ["..bb", "..bb", "..bb", "..bb"],
        ),
        ("Replicate()", "each has all", ["cccc"] * 4, ["cccc"] * 4),
        ("Partial()", "the sum is the tensor", ["dddd"] * 4, ["dddd"] * 4),
    ]
    for number, (name, meaning, first, second) in enumerate(kinds):
        x = 96 + 143 * number
        p.text(x + 44, 36, name, "bold")
        p.text(x + 44, 58, meaning, "small")
        p.grid(x, 78, first)
        p.grid(x, 210, second)
    p.text(569, 196, "+", "bold")
    p.text(44, 127, "rank 0")
    p.text(44, 259, "rank 1")
    p.text(330, 325, "dashed: elements that the rank does not have", "small")
    return p


def mlp() -> Picture:
    """A column-wise and a row-wise layer on two ranks."""
    p = Picture(
        "A two-layer MLP on two ranks: one all-reduce forward, one backward", 690, 330
    )
    columns = [
        (18, 58, "x", "Replicate"), (132, 92, "up", "Colwise"), (250, 76, "h", "Shard(-1)"),
        (352, 92, "down", "Rowwise"), (470, 72, "parts", "Partial"), (608, 64, "y", "Replicate"),
    ]  # fmt: skip
    texts = {
        "up": ("half of its", "outputs"),
        "down": ("half of its", "inputs"),
        "h": ("half",),
        "parts": ("a sum",),
    }
    for x, w, name, style in columns:
        p.text(x + w / 2, 34, name, "bold")
        p.text(x + w / 2, 55, style, "small")
        for rank in range(2):
            kind = {"x": "c", "y": "c", "parts": "d"}.get(name, "ab"[rank])
            p.box(x, 78 + 104 * rank, w, 72, kind, *texts.get(name, (name,)))
    for rank in range(2):
        y = 114 + 104 * rank
        for start, end in (
            (76, 88),
            (118, 131),
            (224, 249),
            (326, 351),
            (444, 469),
            (542, 556),
            (586, 607),
        ):
            p.arrow(start, y, end, y)
    p.upright(88, 70, 192, "backward: all-reduce", "none dashed")
    p.upright(556, 70, 192, "forward: all-reduce", "plain")
    p.text(
        345,
        290,
        "Between the two layers nothing is sent: the activation works on the half that each rank has.",
        "small",
    )
    p.text(
        345,
        312,
        "What goes into `up` is used by both ranks, so its gradient comes back in two parts.",
        "small",
    )
    return p


def gradients() -> Picture:
    """The law of gradients."""
    p = Picture("What a tensor lacks, its gradient must sum", 660, 330)
    p.text(330, 36, "What a tensor lacks, its gradient must sum.", "bold")
    p.text(115, 70, "forward", "bold")
    p.text(545, 70, "backward", "bold")
    rows = [
        ("a copy, used in parts", "nothing to send", "parts are summed", "all-reduce"),
        ("parts, summed", "all-reduce", "a copy, as it is", "nothing to send"),
        ("shards, gathered", "all-gather", "parts, summed and cut", "reduce-scatter"),
        ("parts, summed and cut", "reduce-scatter", "shards, gathered", "all-gather"),
    ]
    for number, (value, there, gradient, back) in enumerate(rows):
        y = 86 + 58 * number
        p.box(20, y, 190, 44, "a", value)
        p.text(270, y + 18, there, "small")
        p.arrow(214, y + 26, 326, y + 26)
        p.box(450, y, 190, 44, "b", gradient)
        p.text(391, y + 18, back, "small")
        p.arrow(446, y + 26, 334, y + 26)
    return p


def checkpoint() -> Picture:
    """A checkpoint that goes from one mesh to another."""
    p = Picture("A checkpoint written by a 2x2 mesh and read by three ranks", 690, 330)
    p.text(112, 34, "saved by dp=2, tp=2", "bold")
    for rank in range(4):
        p.box(
            28 + 92 * (rank % 2),
            60 + 100 * (rank // 2),
            78,
            76,
            "ab"[rank % 2],
            f"rank {rank}",
        )
    p.text(112, 262, "copies are written once,", "small")
    p.text(112, 280, "by one of those that have them", "small")
    p.text(348, 34, "a folder", "bold")
    p.box(248, 52, 200, 192, "none")
    p.box(262, 66, 172, 38, "plain", "checkpoint.json")
    p.box(262, 118, 172, 50, "a", "data-…-00000", ".safetensors")
    p.box(262, 180, 172, 50, "b", "data-…-00003", ".safetensors")
    p.text(348, 262, "the text is written last:", "small")
    p.text(348, 280, "whole, or not there", "small")
    p.text(580, 34, "loaded by tp=3", "bold")
    p.box(530, 56, 100, 54, "a", "rank 0")
    p.box(530, 122, 50, 54, "a")
    p.box(580, 122, 50, 54, "b")
    p.text(580, 154, "rank 1")
    p.box(530, 188, 100, 54, "b", "rank 2")
    p.text(580, 262, "each reads the bytes", "small")
    p.text(580, 280, "of its own part", "small")
    p.arrow(206, 148, 244, 148)
    for y in (83, 149, 215):
        p.arrow(452, y, 526, y)
    p.text(345, 314, "PyTorch or MindSpore on either side", "small")
    return p


def sharded_step() -> Picture:
    """A step of fully_shard with two blocks."""
    p = Picture("A step of a model of two blocks under fully_shard", 820, 330)
    left, width = 140, 66
    tops = {"communication": 50, "computation": 100, "whole: rest": 170}
    tops |= {"whole: block 0": 210, "whole: block 1": 250}
    for lane, top in tops.items():
        p.text(left - 12, top + 20, lane, "small", "end")
    p.text(left + 2.5 * width, 32, "forward", "bold")
    p.text(left + 7.5 * width, 32, "backward", "bold")
    colors = {"rest": "d", "0": "a", "1": "b"}
    communication = ["gather rest", "gather 0", "gather 1", "", "", "gather 1"]
    communication += ["gather 0", "reduce 1", "reduce 0", "reduce rest"]
    computation = ["", "", "run 0", "run 1", "run rest", "back rest", "back 1"]
    computation += ["back 0", "back rest", ""]
    for words, top in ((communication, 50), (computation, 100)):
        for column, word in enumerate(words):
            if word:
                kind = colors[word.split()[1]]
                p.box(left + column * width + 2, top, width - 4, 36, kind)
                verb, unit = word.split()
                p.text(left + (column + 0.5) * width, top + 16, verb, "small")
                p.text(left + (column + 0.5) * width, top + 31, unit, "small")
    spans = ((170, "d", 0, 9), (210, "a", 1, 3), (210, "a", 6, 8))
    for top, kind, first, end in (*spans, (250, "b", 2, 4), (250, "b", 5, 7)):
        p.box(left + first * width + 2, top, (end - first) * width - 4, 30, kind)
    p.text(
        410,
        308,
        "At most the current unit, the next one and the rest are whole at a time.",
    )
    return p


def schedules() -> Picture:
    """Four schedules of a pipeline on one scale of time."""
    p = Picture(
        "The timelines of 1F1B, Interleaved1F1B, ZBV and DualPipeV on four ranks",
        880,
        712,
    )
    p.parts.append(
        "<style>.timeline text { font-size: 11px; } .timeline g text { fill: black; }</style>"
    )
    unit = 25  # pixels of a forward through all layers of a rank
    for number, name in enumerate(("1F1B", "Interleaved1F1B", "ZBV", "DualPipeV")):
        result = simulate(build_schedule(name, 4, 8))
        drawn = draw_svg(result, width=40 + int(unit * result.makespan))
        place = f'x="10" y="{12 + 158 * number}" class="timeline"'
        p.parts.append(drawn.replace("<svg ", f"<svg {place} "))
    meanings = {
        "F": "forward",
        "B": "backward",
        "I": "its part for inputs",
        "W": "its part for parameters",
        "OVERLAP_F_B": "a forward and a backward",
    }
    left = 42
    for kind, meaning in meanings.items():
        opacity = 0.6 if kind == "I" else 1
        p.parts.append(
            f'<rect x="{left}" y="662" width="22" height="22" fill="{COLORS[kind]}" fill-opacity="{opacity}"/>'
        )
        p.text(left + 30, 678, meaning, "small", "start")
        left += 52 + 7 * len(meaning)
    return p


def layers() -> Picture:
    """The layers of the library."""
    p = Picture("The layers of the library; imports point downwards", 690, 585)
    rows: list[tuple[list[str], str]] = [
        (["cli: the command hyper-parallel"], "plain"),
        (["recipe", "verification"], "plain"),
        (["testing: tests on ranks, checks of rules"], "plain"),
        (["ranks: rank processes, started and ended"], "plain"),
        (["training: one step of training"], "a"),
        (["tensor_parallel", "distributed_checkpoint", "pipeline_parallel"], "a"),
        (["shard: what operators do to distributed tensors"], "a"),
        (["dtensor: mesh, layout, redistribution"], "a"),
        (["platform: the contract"], "c"),
        (["platform/torch", "platform/mindspore"], "b"),
    ]
    for number, (names, kind) in enumerate(rows):
        width = (530 - 10 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            p.box(20 + (width + 10) * place, 18 + 55 * number, width, 42, kind, name)
    for y, lines in (
        (310, ("core: knows", "no framework")),
        (510, ("the only code", "that imports", "a framework")),
    ):
        for number, line in enumerate(lines):
            p.text(628, y + 20 * number, line, "small")
    p.arrow(565, 24, 565, 560)
    return p


PICTURES = (
    mesh,
    placements,
    mlp,
    gradients,
    checkpoint,
    sharded_step,
    schedules,
    layers,
)


def main() -> None:
    """Writes the files."""
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
