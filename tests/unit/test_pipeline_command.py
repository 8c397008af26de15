# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel schedule``: one schedule, a file of one's own, and all of them."""

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import schedule as command  # noqa: F401 - it adds the command
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.schedules import SCHEDULES, build_schedule
from hyper_parallel.core.pipeline_parallel.text import read_csv


def run(*arguments):
    return CliRunner().invoke(application, ["schedule", *map(str, arguments)])


def test_a_schedule_is_drawn_and_priced():
    result = run("1f1b", "-p", 4, "-m", 8)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        "r0  0F0 0F1 0F2 0F3 ·   ·   ·   ·   ·   ·   0B0─────0F4"
    )
    assert lines[5:] == [
        "1F1B: 4 ranks, 4 stages, 8 micro batches",
        "  makespan      33",
        "  bubble        9 (27.3% of the makespan)",
        "  within spans  9 6 3 0   idle between a rank's first and last action",
        "  activations   4 3 2 1   micro batches of all layers of a rank, at most",
        "  messages      48",
    ]


def test_times_are_given():
    text = run("ZBV", "--input", 1.2, "--weight", 0.8).stdout
    assert "  bubble        1.8 (7.0% of the makespan)" in text
    assert "  makespan      41" in run("1F1B", "--message", 0.5).stdout
    slow = run("1F1B", "--message", 0.5, "--rendezvous").stdout
    assert "  makespan      45.5" in slow
    assert "  makespan      27\n" in run("dualpipev", "--atomic-pairs").stdout
    assert "  makespan      25.5\n" in run("dualpipev").stdout


def test_orders_are_printed_with_messages():
    text = run("interleaved", "-p", 2, "-m", 2, "--chunks", 2, "--messages").stdout
    schedule = add_messages(build_schedule("interleaved", 2, 2, 2))
    assert text.endswith(f"\n\n{schedule}\n")


def test_files_are_written_and_read(tmp_path):
    svg, plain, full = (tmp_path / name for name in ("a.svg", "a.csv", "b.csv"))
    assert run("zbv", "--svg", svg, "--csv", plain).exit_code == 0
    assert svg.read_text().startswith("<svg")
    assert read_csv(plain).orders == build_schedule("zbv", 4, 8).orders
    run("zbv", "--csv", full, "--messages")
    assert read_csv(full).orders == add_messages(build_schedule("zbv", 4, 8)).orders
    for path in (plain, full):
        result = run(path)
        assert result.exit_code == 0
        assert f"{path.name}: 4 ranks, 8 stages, 8 micro batches" in result.stdout
        assert "  makespan      25.5" in result.stdout


@pytest.mark.parametrize("arguments", [[], ["1F1B", "--compare"]])
def test_all_schedules_are_compared(arguments):
    result = run(*arguments, "-p", 4, "-m", 8)
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    assert head.split()[:4] == ["schedule", "stages", "makespan", "bubble"]
    assert [row.split()[0] for row in rows] == list(SCHEDULES)
    assert rows[7].split() == ["ZBV", "8", "25.5", "1.5", "5.9%", "0", "4", "96"]
    odd = run("-p", 3, "-m", 5).stdout
    assert "DualPipeV" in odd
    assert "DualPipe " not in odd


def test_a_wrong_file_is_told(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    result = run(path)
    assert result.exit_code == 1
    assert result.stdout.startswith(
        "wrong: mine.csv: deadlock whether or not sends wait: rank 0, index 1 (0B0) waits for"
    )
    path.write_text("0F0,0B0\n1F0\n")
    result = run(path)
    assert (result.exit_code, "rank 1 lacks 1B0" in result.stdout) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["zero"], "unknown pipeline schedule 'zero'"),
        (["dualpipe", "-m", "7"], "nearest: 6 or 8"),
        (["zbv", "--chunks", "3"], "ZBV has 2 stages per rank, got 3"),
        (["1f1b", "--input", "-1"], "must be a finite number"),
        (["-p", "0"], "must be positive, got 0"),
        (["nothing.csv"], "there is no file nothing.csv"),
    ],
)
def test_what_cannot_be_done_is_told(arguments, problem):
    result = run(*arguments)
    assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr
    assert result.stderr.count("hyper-parallel explain") == 1


def test_bad_cells_of_a_file_are_told(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0X0\n")
    result = run(path)
    assert (result.exit_code, "row 1, column 2: '0X0'" in result.stderr) == (2, True)
