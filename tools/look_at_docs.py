# SPDX-License-Identifier: Apache-2.0
"""Looks at the built site in a real browser, after ``make docs``.

.venv/bin/python tools/look_at_docs.py --shots build/shots

Chromium (Debian's package) opens every page as wide as a desk and as wide as a phone. Whatever is wider than the
screen, an image that is missing, an error on the console or a request to another host is told, and the exit code is 1.
``--shots`` also takes a picture of every page, for people to look at.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from html import unescape
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "site"
WIDTHS = {"desk": (1280, 1800), "phone": (390, 1600)}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)

# Opens each page in a frame, in turn, and leaves what it found as text.
PROBE = """<!doctype html><meta charset="utf-8"><body><script>
const pages = %s, widths = %s, found = [];
const wait = ms => new Promise(done => setTimeout(done, ms));
(async () => {
  for (const page of pages) for (const [name, [width, height]] of Object.entries(widths)) {
    const frame = document.createElement("iframe");
    frame.style = `border: 0; width: ${width}px; height: ${height}px`;
    const loaded = new Promise(done => frame.onload = done);
    frame.src = "/" + page;
    document.body.append(frame);
    await loaded;
    await wait(200);
    const inside = frame.contentDocument, told = [];
    const wide = inside.documentElement.scrollWidth;
    if (wide > width) told.push(`is ${wide} wide`);
    for (const image of inside.images) if (!image.naturalWidth) told.push(`has no image ${image.src}`);
    for (const entry of frame.contentWindow.performance.getEntriesByType("resource"))
      if (new URL(entry.name).host !== location.host) told.push(`asks for ${entry.name}`);
    found.push(...told.map(text => `${page} (${name}) ${text}`));
    frame.remove();
  }
  document.body.innerHTML = "";
  const made = document.createElement("pre");
  made.id = "found";
  made.textContent = JSON.stringify({looked: pages.length, found});
  document.body.append(made);
})();
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and the probe."""

    pages: tuple[str, ...] = ()

    def do_GET(self) -> None:
        """Answers a request."""
        if self.path != "/probe":
            super().do_GET()
            return
        text = (PROBE % (json.dumps(self.pages), json.dumps(WIDTHS))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def chromium(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the browser once."""
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    command = [program, *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(  # noqa: S603 - see above
        command, capture_output=True, text=True, timeout=600, check=False
    )


def problems(base: str, profile: Path) -> list[str]:
    """What is wrong with any page."""
    run = chromium(
        profile, "--virtual-time-budget=600000", "--dump-dom", f"{base}/probe"
    )
    report = re.search(r'<pre id="found">(.*?)</pre>', run.stdout, re.DOTALL)
    if report is None:
        return [f"the browser did not get to the end: {run.stderr[-1000:]}"]
    wrong = re.compile(r"CONSOLE.*(error|denied|refused|failed)", re.IGNORECASE)
    console = [line for line in run.stderr.splitlines() if wrong.search(line)]
    return [*json.loads(unescape(report[1]))["found"], *console]


def take_shots(base: str, profile: Path, pages: tuple[str, ...], folder: Path) -> None:
    """A picture of every page in every width."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        name = page.removesuffix("index.html").strip("/").replace("/", "-") or "home"
        for width, (across, down) in WIDTHS.items():
            file = folder / f"{name}-{width}.png"
            chromium(
                profile,
                f"--window-size={across},{down}",
                f"--screenshot={file}",
                f"{base}/{page}",
            )


def main() -> int:
    """Looks at all pages."""
    parser = argparse.ArgumentParser(
        description="Looks at the built site in a real browser."
    )
    parser.add_argument("--shots", type=Path, help="a folder for pictures of the pages")
    parser.add_argument("--site", type=Path, default=SITE)
    options = parser.parse_args()
    pages = tuple(
        sorted(
            file.relative_to(options.site).as_posix()
            for file in options.site.rglob("index.html")
        )
    )
    Quiet.pages = pages
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=options.site)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as profile:
        found = problems(base, Path(profile))
        if options.shots:
            take_shots(base, Path(profile), pages, options.shots)
    server.shutdown()
    print("\n".join(found) or f"{len(pages)} pages, nothing wrong")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
