# SPDX-License-Identifier: Apache-2.0
"""No block of code and no link in the documents is unchecked.

A Python block is an excerpt of a tested example, or it runs: the blocks of a page are one program, after what
tests/docs/before/<page>.py prepares, on as many ranks as RANKS says, or in one process. A plain block right after it is
what it prints (``...`` stands for anything). In a shell block every command, target, option, file and recipe exists.
"""

import ast
import contextlib
import doctest
import importlib.util
import io
import os
import re
import shlex
import sys
import textwrap
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from hyper_parallel.testing import run_ranks
from tools import pictures, reference

ROOT = Path(__file__).resolve().parents[2]
BEFORE = Path(__file__).with_name("before")
GENERATED = {
    "mindspore-operators.md",
    "operators.md",
    "platform.md",
    "reference.md",
}  # they have no code of their own
PAGES = [
    *(
        ROOT / name
        for name in ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
RANKS = {
    "checkpoints": 4,
    "context-parallel": 4,
    "data": 4,
    "differences": 2,
    "distributed-tensors": 2,
    "expert-parallel": 4,
    "lora": 2,
    "mixed-precision": 2,
    "recipes": 2,
    "saving": 2,
    "second-order": 2,
    "situations": 4,
    "planning": 4,
}
ELSEWHERE = {
    "add-an-operator",
    "testing",
}  # test_documents runs these in processes of their own
LANGUAGES = {"", "json", "py", "pycon", "python", "sh", "yaml"}
FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2[ ]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced or an indented piece of a page."""

    page: Path
    line: int
    language: str
    text: str
    is_output: bool = (
        False  # it follows a Python block with nothing but blank lines between
    )

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page, text=None):
    text = page.read_text() if text is None else text
    found = list(FENCE.finditer(text))
    made = []
    for before, match in pairwise([None, *found]):
        follows = (
            before is not None
            and before[3] in ("python", "py")
            and not text[before.end() : match.start()].strip()
        )
        line = text.count("\n", 0, match.start()) + 1
        made.append(
            Block(
                page,
                line,
                match[3].strip(),
                textwrap.dedent(match[4]),
                follows and not match[3].strip(),
            )
        )
    outside = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in re.finditer(r"(?<=\n\n)((?: {4}[^\n]*\n)+)", outside):
        if not re.search(r"^\s*([-*]|\d+\.) ", match[0]):  # a list in a list
            line = outside.count("\n", 0, match.start()) + 1
            made.append(Block(page, line, "", textwrap.dedent(match[0])))
    return made


BLOCKS = [
    block for page in PAGES if page.name not in GENERATED for block in blocks_of(page)
]


# --- Python


def is_excerpt(text, sources):
    """Whether some source has these lines in a row, at any depth; a line ``...`` stands for some that are left out."""
    parts = [
        part.strip("\n")
        for part in re.split(r"^\s*\.\.\.\s*$", text, flags=re.MULTILINE)
    ]
    return any(
        all(_stands_in(part, source) for part in parts if part.strip())
        for source in sources
    )


def _stands_in(part, source):
    wanted = textwrap.dedent(part).splitlines()
    lines = source.splitlines()
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start].strip() != wanted[0].strip():
            continue  # dedenting all lines costs more
        run = textwrap.dedent(
            "\n".join(lines[start : start + len(wanted)])
        ).splitlines()
        if [line.rstrip() for line in run] == [line.rstrip() for line in wanted]:
            return True
    return False


SOURCES = [example.read_text() for example in EXAMPLES]


def programs():
    """Page -> its blocks that are no excerpts, in order."""
    found = {}
    for block in BLOCKS:
        if block.language in ("python", "py") and not is_excerpt(block.text, SOURCES):
            found.setdefault(block.page, []).append(block)
    return found


PROGRAMS = programs()


def written(page, folder):
    """The program of a page as a file, whose lines are numbered as the page's code is by itself."""
    before = BEFORE / f"{page.stem}.py"
    file = folder / f"{page.stem.replace('-', '_')}.py"
    guard = f"if __import__('os').getpid() == {os.getpid()}:"  # as a script has it: false where ranks import the file
    text = "\n".join(block.text for block in PROGRAMS[page]).replace(
        'if __name__ == "__main__":', guard
    )
    file.write_text((before.read_text() if before.exists() else "") + text)
    return file


def on_rank(file, folder):
    """Runs a page's program on this rank; what it printed."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(compile(Path(file).read_text(), file, "exec"), {"__name__": "page"})
    return told.getvalue()


def alone(file, folder, monkeypatch):
    """Runs a page's program in this process; it may run functions of its own on ranks."""
    monkeypatch.chdir(folder)
    spec = importlib.util.spec_from_file_location(f"page_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        spec.loader.exec_module(module)
    return told.getvalue()


@pytest.mark.parametrize(
    "page",
    [page for page in PROGRAMS if page.stem not in ELSEWHERE],
    ids=lambda page: page.stem,
)
def test_python_of_a_page_runs_and_prints_what_the_page_says(
    page, tmp_path, monkeypatch
):
    file = written(page, tmp_path)
    ranks = RANKS.get(page.stem)
    if ranks is None:
        told = alone(file, tmp_path, monkeypatch)
    else:
        told = run_ranks(on_rank, ranks, str(file), str(tmp_path), timeout=120)[0]
    place = 0
    for block in BLOCKS:
        if block.page == page and block.is_output:
            pattern = re.sub(
                r"worst:.*?rank\\ \d", ".*?", re.escape(block.text.strip())
            )  # rounding has no fixed worst
            pattern = pattern.replace(re.escape("..."), ".*?")
            found = re.compile(pattern, re.DOTALL).search(told, place)
            assert found, f"{block} is not what was printed:\n{told[place:]}"
            place = found.end()


@pytest.mark.parametrize(
    "name", sorted({block.page.stem for block in BLOCKS if block.language == "pycon"})
)
def test_sessions_in_a_page_are_right(name):
    names = {}
    exec((BEFORE / f"{name}.py").read_text(), names)
    text = "\n".join(
        block.text
        for block in BLOCKS
        if block.page.stem == name and block.language == "pycon"
    )
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples
    told = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.write)
    assert told.getvalue() == ""


def hidden_python(blocks):
    """Blocks that are Python and are not called so, which nobody would run."""
    hidden = []
    for block in blocks:
        if block.language or block.is_output:
            continue
        try:
            tree = ast.parse(block.text)
        except SyntaxError:
            continue
        if any(
            isinstance(node, (ast.Call, ast.Import, ast.ImportFrom, ast.With))
            for node in ast.walk(tree)
        ):
            hidden.append(str(block))
    return hidden


def test_no_python_hides_in_a_plain_block():
    assert hidden_python(BLOCKS) == []
    assert {block.language for block in BLOCKS} <= LANGUAGES


def test_pages_that_are_excerpts_of_an_other_framework_only_are_excerpts():
    """They cannot run here: whatever they show stands in an example that tests/frameworks run."""
    for name in ("mindspore",):
        assert ROOT / f"docs/{name}.md" not in PROGRAMS


def test_control_blocks_that_are_wrong_are_found(tmp_path):
    page = ROOT / "docs/page.md"
    text = "a\n\n```python\nprint(1)\n```\n\n```\n2\n```\n\n    y = f(x)\n\n```\nmodel.load(x)\n```\n"
    first, output, plain, indented = blocks_of(page, text)
    assert (first.language, first.line, output.is_output, plain.is_output) == (
        "python",
        3,
        True,
        False,
    )
    assert hidden_python([first, output, plain, indented]) == [
        "docs/page.md:13",
        "docs/page.md:11",
    ]
    assert is_excerpt(
        "x = 1\n...\n    y = 2\n", ["if a:\n    x = 1\n    z = 3\n    y = 2\n"]
    )
    assert not is_excerpt("x = 1\ny = 2\n", ["x = 1\nz = 3\ny = 2\n"])


# --- commands

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(
    re.findall(
        r"^(\w+) = \[",
        (ROOT / "pyproject.toml").read_text().partition("[project.optional")[2],
        re.MULTILINE,
    )
)
COMMANDS = {
    "make",
    "hyper-parallel",
    "torchrun",
    "msrun",
    "python",
    "pip",
    "pre-commit",
    "export",
    "srun",
    ".",
}


def command_lines(block):
    """The command lines of a block, without what is said about them."""
    for line in block.text.replace("\\\n", " ").splitlines():
        ours = re.match(r"(\S*/)?(make|hyper-parallel|torchrun|msrun) ", line)
        command = re.split(r"\s#|\s{3,}(?=\S)", line.removeprefix("$ ").strip())[0]
        if command and (block.language == "sh" or line.startswith("$ ") or ours):
            yield command


def problems_of(line, commands):
    """What is wrong with a command line."""
    words = shlex.split(line)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # of the environment
        words = words[1:]
    name = Path(words[0]).name if words[0] != "." else "."
    if name not in COMMANDS:
        return [f"unknown command {name}"]
    if name == "make":
        return [f"no target {word}" for word in words[1:] if word not in TARGETS]
    if name == "pip":
        named = re.findall(r"hyper_parallel\[([\w,]+)\]", line)
        return [
            f"no extra {extra}"
            for one in named
            for extra in one.split(",")
            if extra not in EXTRAS
        ]
    if name == "hyper-parallel":
        return list(problems_of_ours(words[1:], commands))
    return [
        f"no file {word}"
        for word in words[1:]
        if "/" in word
        and word.endswith((".py", ".yaml"))
        and not (ROOT / word).exists()
    ]


HAS_MINDSPORE = importlib.util.find_spec("mindspore") is not None


def problems_of_ours(words, commands):
    from hyper_parallel.recipe import RecipeError, read_recipe

    command, depth = commands, 0
    while (
        hasattr(command, "commands")
        and depth < len(words)
        and words[depth] in command.commands
    ):
        command, depth = command.commands[words[depth]], depth + 1
    if (
        hasattr(command, "commands")
        and depth < len(words)
        and not words[depth].startswith("-")
    ):
        yield f"no subcommand {words[depth]}"
        return
    known = {option for parameter in command.params for option in parameter.opts} | {
        "--help",
        "--install-completion",
    }
    known |= {"--show-completion", "--version"}
    given = words[depth:]
    values = [after for word, after in pairwise(given) if word.startswith("--")]
    yield from (
        f"no option {word}"
        for word in given
        if word.startswith("--") and word.partition("=")[0] not in known
    )
    recipes = [word for word in given if word.endswith(".yaml") and "/" in word]
    overrides = [
        os.path.expandvars(w)
        for w in given
        if re.match(r"[a-z_.]+=", w) and w not in values
    ]
    for recipe in recipes:
        ranks = next(
            (int(after) for word, after in pairwise(given) if word == "--nproc"), None
        )
        try:
            read_recipe(ROOT / recipe, overrides, ranks)
        except RecipeError as error:
            # The folder of one is not there, and the framework of one may not be: `make newest` has torch alone.
            if "huggingface" not in recipe and (
                "mindspore" not in recipe or HAS_MINDSPORE
            ):
                yield str(error)


@pytest.fixture(scope="module")
def commands():
    import typer.main

    from hyper_parallel.cli import checkpoints, main  # noqa: F401

    for name in ("doctor", "ops", "plan", "schedule", "train", "verify", "explain"):
        if importlib.util.find_spec(f"hyper_parallel.cli.{name}"):
            importlib.import_module(f"hyper_parallel.cli.{name}")
    return typer.main.get_command(checkpoints.application)


def test_what_shell_blocks_say_exists(commands, monkeypatch):
    monkeypatch.setenv("PWD", str(ROOT))
    lines = [
        (block, line)
        for block in BLOCKS
        if not block.is_output
        for line in command_lines(block)
    ]
    assert len(lines) > 20
    wrong = [
        f"{block}: {line}: {problem}"
        for block, line in lines
        for problem in problems_of(line, commands)
    ]
    assert wrong == []


def test_commands_in_sentences_exist(commands):
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"`make ([a-z-]+)`", text)) <= TARGETS, page
        assert set(re.findall(r"`hyper-parallel ([a-z]+)", text)) <= set(
            commands.commands
        ), page


def test_control_wrong_commands_are_found(commands):
    assert problems_of("make demo", commands) == []
    assert problems_of("make dmeo", commands) == ["no target dmeo"]
    assert problems_of("frobnicate now", commands) == ["unknown command frobnicate"]
    assert problems_of("pip install 'hyper_parallel[torch,nothing]'", commands) == [
        "no extra nothing"
    ]
    assert problems_of(
        ".venv/bin/torchrun --nproc-per-node 4 examples/last.py", commands
    ) == ["no file examples/last.py"]
    assert problems_of("hyper-parallel trian x", commands) == ["no subcommand trian"]
    assert problems_of("hyper-parallel doctor --framwork torch", commands) == [
        "no option --framwork"
    ]
    [problem] = problems_of(
        "hyper-parallel train examples/recipes/demo.yaml optimizer.lrr=1", commands
    )
    assert "did you mean" in problem


# --- links


def slugs(page):
    """The anchors of a page's headings, as the site makes them."""
    made = {}
    for title in re.findall(
        r"^#+ +(.*?) *#*$", FENCE.sub("", page.read_text()), re.MULTILINE
    ):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title)
        ascii_only = (
            unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        )
        slug = re.sub(
            r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower()
        )
        made[slug] = made.get(slug, 0) + 1
    anchors = set(re.findall(r'(?:id|name)="([^"]+)"', page.read_text()))
    return (
        set(made)
        | {f"{slug}_{n}" for slug, count in made.items() for n in range(1, count)}
        | anchors
    )


def broken_links(page, text=None):
    text = FENCE.sub("", page.read_text() if text is None else text)
    text = re.sub(r"`[^`\n]*`(?!\])", "", text)  # f[x](y) is no link
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in slugs(target)
        ):
            yield link


def test_links_lead_somewhere():
    assert [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in broken_links(page)
    ] == []


def test_control_broken_links_are_found():
    page = ROOT / "docs/index.md"
    text = "[a](nowhere.md) [b](architecture.md#glossary) [c](architecture.md#nothing) `f[x](y)` [`d`](gone.py)"
    assert list(broken_links(page, text)) == [
        "nowhere.md",
        "architecture.md#nothing",
        "gone.py",
    ]


def test_every_page_is_in_the_menu_and_the_pages_ask_no_other_host():
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in menu, page
    assert "font: false" in menu
    assert "://" not in menu + (ROOT / "docs/style.css").read_text()


# --- what is generated


def test_the_pictures_are_those_that_the_tool_draws():
    drawn = {f"{draw.__name__}.svg": draw().svg() for draw in pictures.PICTURES}
    assert {
        file.name: file.read_text() for file in pictures.FOLDER.glob("*.svg")
    } == drawn, "run make docs"
    shown = set(
        re.findall(r"\(pictures/(\w+\.svg)\)", (ROOT / "docs/pictures.md").read_text())
    )
    assert shown == set(drawn)


def test_the_reference_is_current():
    assert reference.PAGE.read_text() == reference.page(), "run make docs"


def test_every_public_name_is_in_the_reference_with_a_sentence():
    entries = reference.entries()
    import hyper_parallel

    assert set(hyper_parallel.__all__) <= {
        entry.name for entry in entries["hyper_parallel"]
    }
    assert [
        entry.name
        for found in entries.values()
        for entry in found
        if len(entry.summary) < 10
    ] == []
