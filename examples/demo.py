"""Trains a model as one process, as four on a 2x2 mesh, and as four that are killed and go on, and compares them.

Each training is a call of ``hyper-parallel train`` with recipes/demo.yaml; llama/train.py is the same by hand.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

EXAMPLES = Path(__file__).parent
sys.path.append(str(EXAMPLES / "llama"))

from generate import generate, load  # noqa: E402 - it is found now
from hyper_parallel.core.distributed_checkpoint import read_objects  # noqa: E402
from model import Llama  # noqa: E402
from train import latest  # noqa: E402

RECIPE = EXAMPLES / "recipes" / "demo.yaml"
COMMAND = Path(sys.executable).with_name("hyper-parallel")
DP, TP = 2, 2
MESH = (f"mesh.dp={DP}", f"mesh.tp={TP}")
AXES, PASSES = ["tp", "dp", "all axes"], ["forward", "backward", "numbers"]
NUMBER = 64  # bytes: what is not larger is no tensor but a number, such as the loss
# What rounding comes to in a few hundred steps: training amplifies it, on one process too (some 500 times in these).
LARGEST = {"float32": 1e-3, "float64": 1e-10, "bfloat16": 1.0}

Kind = tuple[str, str, str]  # axis, pass, collective
Costs = dict[Kind, tuple[int, float]]  # how often, and the bytes that a rank receives


def main() -> None:
    """Everything. What is no option of this script is an override of the recipe, for all trainings."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)  # of an earlier demo
    one, many, broken = (options.out / name for name in ("one", "mesh", "killed"))
    common = [f"steps={options.steps}", *options.overrides]
    on_mesh = [*common, *MESH]

    run([*common, f"folder={one}"])
    run([*on_mesh, f"folder={many}", "logging.collectives=true"])
    every = max(1, options.steps // 8)
    killed = [*on_mesh, f"folder={broken}", f"checkpoints.every={every}"]
    killed_at = run_until(killed, broken, 5 * every + every // 2)
    resumed_at = read_objects(latest(broken))["checkpoint"]["step"]
    run([*killed, "--resume", "auto"])

    losses = read_losses(one), read_losses(many)
    folder = latest(many)
    model, recipe = load(folder), read_objects(folder)["run"]["recipe"]
    ours, theirs = counted(many / "collectives.json"), megatron(recipe, model)
    worst = max(abs(losses[1][step] - losses[0][step]) for step in losses[0])
    picture = options.out / "loss.png"
    draw(*losses, picture)

    console = Console(width=100)
    console.print(table_of_losses(*losses))
    console.print(
        f"The largest difference in all {options.steps} steps is {worst:.1e}.\n"
    )
    same = read_losses(broken) == losses[1]
    console.print(
        f"A third run was killed at step {killed_at} and went on from the checkpoint of step {resumed_at}: its losses "
        f"are {'the same to the last bit' if same else 'DIFFERENT from those of the run that was not'}.\n"
    )
    console.print(table_of_costs(ours, theirs))
    console.print(
        Panel(
            Text(generate(model, "class ", 400)),
            title="what the model on the mesh has learnt to write",
        )
    )
    console.print(
        f"Both curves are in {picture}. To go on from the checkpoint, on four processes or on one:"
    )
    further = [
        f"folder={many}",
        f"steps={2 * options.steps}",
        *options.overrides,
        "--resume auto",
    ]
    for mesh in (MESH, ()):
        print(
            " ",
            os.path.relpath(COMMAND),
            "train",
            os.path.relpath(RECIPE),
            *mesh,
            *further,
        )
    if not same:
        raise SystemExit(
            "The run that was killed and went on has other losses than the one that was not."
        )
    if worst > LARGEST[recipe["precision"]["parameters"]]:
        raise SystemExit(
            f"The losses differ by {worst:.1e}: that is more than rounding explains."
        )


def command(arguments: Sequence[str]) -> list[str]:
    """The command that trains, shown before it runs."""
    print(
        f"$ hyper-parallel train {os.path.relpath(RECIPE)} {' '.join(arguments)}",
        flush=True,
    )
    return [str(COMMAND), "train", str(RECIPE), *arguments]


def run(arguments: Sequence[str]) -> None:
    """Trains to the end, with one thread a process: there are few cores, and more threads would only wait."""
    subprocess.run(  # noqa: S603
        command(arguments), check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def run_until(arguments: Sequence[str], folder: Path, step: int) -> int:
    """Trains until the log has a step, then kills the rank that logs; the last step that it logged."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command(arguments), env=environment) as started:  # noqa: S603
        while max(read_losses(folder), default=0) < step:
            if started.poll() is not None:
                raise SystemExit(
                    f"The training that was to be killed ended by itself with {started.returncode}."
                )
            time.sleep(0.02)
        os.kill(
            json.loads((folder / "run.json").read_text())["processes"][0],
            signal.SIGKILL,
        )
    return max(read_losses(folder))


def read_losses(folder: Path) -> dict[int, float]:
    """The loss of every step."""
    log = folder / "log.jsonl"
    whole = (
        log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
    )  # the last line may be cut short
    return {facts["step"]: facts["loss"] for facts in map(json.loads, whole)}


def table_of_losses(
    one: dict[int, float], many: dict[int, float], rows: int = 15
) -> Table:
    """Some steps from the first to the last."""
    table = Table(title="Loss, step by step")
    for name in ("step", "one process", f"mesh {DP}x{TP}", "difference"):
        table.add_column(name, justify="right")
    for step in sorted({1 + (len(one) - 1) * row // (rows - 1) for row in range(rows)}):
        table.add_row(
            str(step),
            f"{one[step]:.7f}",
            f"{many[step]:.7f}",
            f"{many[step] - one[step]:+.1e}",
        )
    return table


# --- communication


def counted(file: Path) -> Costs:
    """What the ledger of one step says."""
    counts: Counter[Kind] = Counter()
    nbytes: Counter[Kind] = Counter()
    for entry in json.loads(file.read_text()):
        way = (
            "numbers"
            if entry["nbytes"] <= NUMBER
            else "backward"
            if entry["backward"]
            else "forward"
        )
        name = entry["collective"].removesuffix("_into_tensor").removesuffix("_tensor")
        kind = (entry["axis"], way, name.replace("_", "-"))
        counts[kind] += 1
        nbytes[kind] += entry["nbytes"]
    return {kind: (counts[kind], nbytes[kind]) for kind in counts}


def megatron(recipe: dict[str, Any], model: Llama) -> Costs:
    """What Megatron's scheme costs by its papers: two exchanges a layer and one for embedding and head, each way.

    Its loss takes three sums over the vocabulary, for the largest logit, the target's, and the exponentials. With
    sequence parallel the gradients of the norms need a sum of their own. (That its code gathers inputs a second time in
    backward, to save memory, is not counted.)
    """
    element = {"float32": 4, "float64": 8, "bfloat16": 2}[
        recipe["precision"]["parameters"]
    ]
    tokens = recipe["data"]["batch"] // DP * recipe["data"]["length"]
    exchanges = 2 * model.config.layers + 1
    matrices, vectors = (
        sum(p.numel() for p in model.parameters() if (p.ndim > 1) == cut)
        for cut in (True, False)
    )

    def moved(elements: float, ranks: int) -> float:
        """What a rank receives in an all-gather or a reduce-scatter; an all-reduce is both."""
        return elements * element * (ranks - 1) / ranks

    stream, loss = moved(tokens * model.config.dim, TP), 3 * 2 * moved(tokens, TP)
    costs: Costs = {
        ("tp", "forward", "all-reduce"): (exchanges + 3, exchanges * 2 * stream + loss),
        ("tp", "backward", "all-reduce"): (exchanges, exchanges * 2 * stream),
        ("dp", "backward", "all-reduce"): (1, 2 * moved(matrices / TP + vectors, DP)),
        ("tp", "numbers", "all-reduce"): (
            1,
            2 * moved(1, TP),
        ),  # the norm of the gradients
        ("dp", "numbers", "all-reduce"): (
            1,
            2 * moved(1, DP),
        ),  # the loss, to report it
    }
    if recipe["plan"]["arguments"]["sequence_parallel"]:
        both = {
            (way, kind): (exchanges, exchanges * stream)
            for way in PASSES[:2]
            for kind in ("all-gather", "reduce-scatter")
        }
        costs |= {("tp", way, kind): cost for (way, kind), cost in both.items()}
        costs["tp", "forward", "all-reduce"] = (3, loss)
        costs["tp", "backward", "all-reduce"] = (1, 2 * moved(vectors, TP))
    return costs


def table_of_costs(ours: Costs, theirs: Costs) -> Table:
    """Both side by side."""
    table = Table(
        title="Collectives of one training step, and the KiB that a rank receives",
        show_footer=True,
    )
    total = {
        id(costs): (
            sum(c for c, _ in costs.values()),
            sum(b for _, b in costs.values()),
        )
        for costs in (ours, theirs)
    }
    for name, footer in (("axis", "all"), ("pass", ""), ("collective", "")):
        table.add_column(name, footer)
    for name, costs in (("ledger", ours), ("Megatron", theirs)):
        count, nbytes = total[id(costs)]
        table.add_column(name, str(count), justify="right")
        table.add_column("KiB", f"{nbytes / 1024:.1f}", justify="right")
    for kind in sorted(
        ours.keys() | theirs.keys(),
        key=lambda kind: (PASSES.index(kind[1]), AXES.index(kind[0]), kind),
    ):
        cells = [
            (str(c[kind][0]), f"{c[kind][1] / 1024:.1f}") if kind in c else ("-", "-")
            for c in (ours, theirs)
        ]
        table.add_row(*kind, *cells[0], *cells[1])
    return table


# --- picture


def draw(one: dict[int, float], many: dict[int, float], file: Path) -> None:
    """Both curves, and their distance below."""
    from matplotlib.figure import Figure  # takes a while, and is not needed before

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    above.plot(one.keys(), one.values(), linewidth=4, alpha=0.35, label="one process")
    above.plot(
        many.keys(), many.values(), linewidth=1, color="black", label=f"mesh {DP}x{TP}"
    )
    above.set(ylabel="loss", title="The same model, the same data")
    above.legend()
    below.plot(one.keys(), [abs(many[step] - one[step]) for step in one])
    below.set(ylabel="difference", xlabel="step")
    below.set_yscale("symlog", linthresh=1e-7)  # a difference may be none at all
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
