# SPDX-License-Identifier: Apache-2.0
"""Gives the site a page for each file beside docs/ that a page links to: an example, a source, the contributor's guide.

A link such as [`plan.py`](../examples/llama/plan.py) is right where the file lies in the repository, and leads to a
page of the site, where its text stands. mkdocs calls what is below (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
FENCES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".c": "c", "": "make"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of what is linked to, and of what that links to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        source = waiting.pop()
        for target in outside(source):
            if target not in known:
                known.add(target)
                if target.suffix == ".md":
                    waiting.append(target)
                files.append(
                    File.generated(config, page_of(target), content=text_of(target))
                )
    return files


def on_page_markdown(
    markdown: str,
    page: Page,
    config: MkDocsConfig,  # noqa: ARG001
    files: Files,  # noqa: ARG001 - mkdocs'
) -> str:
    """Has links to such files lead to their pages."""
    here = page.file.src_uri
    source = (
        ROOT / here.removeprefix("repository/")
        if here.startswith("repository/")
        else DOCS / here
    )
    if (
        source.suffix == ".md" and not source.exists()
    ):  # a page that shows a source, whose text links to nothing
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = target_of(source, link[0])
        return (
            link[0]
            if target is None
            else os.path.relpath(page_of(target), Path(here).parent)
        )

    return LINK.sub(moved, markdown)


def outside(source: Path) -> Iterator[Path]:
    """The files beside docs/ that a page links to."""
    for link in LINK.findall(source.read_text()):
        target = target_of(source, link)
        if target is not None and not target.is_relative_to(DOCS):
            yield target


def target_of(source: Path, link: str) -> Path | None:
    """The file of the repository that a page's link means."""
    target = (source.parent / link).resolve()
    return (
        target
        if "://" not in link and target.is_relative_to(ROOT) and target.is_file()
        else None
    )


def page_of(target: Path) -> str:
    """Where the site has a file."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    return f"repository/{path}" if target.suffix == ".md" else f"repository/{path}.md"


def text_of(target: Path) -> str:
    """A file as a page."""
    text = target.read_text()
    if target.suffix == ".md":
        return text
    return f"# {target.name}\n\n`{target.relative_to(ROOT)}`\n\n````{FENCES.get(target.suffix, '')}\n{text}````\n"
