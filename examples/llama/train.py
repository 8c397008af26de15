"""Trains the model: as one process, or unchanged on a mesh of processes that torchrun starts on one or more machines.

python examples/llama/train.py --steps 300
torchrun --nproc-per-node 4 examples/llama/train.py --steps 300 --mesh 2x2 --sequence-parallel
python examples/llama/train.py --steps 600 --resume build/llama
"""

import json
import math
import os
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from data import Corpus
from hyper_parallel import (
    CommunicationLedger,
    get_platform,
    init_device_mesh,
    load,
    loss_parallel,
)
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointManager,
    OptimizerState,
    RandomState,
    read_objects,
)
from model import Config, Llama
from plan import put_on_mesh

platform = get_platform()


def train(options: Namespace, mesh: Any = None) -> Llama:
    """Trains from the start or from a checkpoint up to ``options.steps`` steps; without a mesh as one process."""
    torch.manual_seed(options.seed)  # the same model on every rank
    model = Llama(config_of(options)).to(
        platform.device(), getattr(torch, options.dtype)
    )
    if mesh is not None:
        put_on_mesh(model, mesh, sequence_parallel=options.sequence_parallel)
    place = (
        (mesh["dp"].get_local_rank(), mesh["dp"].size()) if mesh is not None else (0, 1)
    )
    corpus = Corpus(options.batch, options.context, options.seed, *place)
    optimizer = new_optimizer(model, options)
    state = {
        "model": model,
        "optimizer": OptimizerState(model, optimizer),
        "random": RandomState(),
    }
    checkpoints = CheckpointManager(
        options.out, keep_last=options.keep, asynchronous=True
    )
    done = 0
    if options.resume:
        folder = latest(options.resume)
        load(state, checkpoint_id=folder)
        done = read_objects(folder)["checkpoint"]["step"]

    with Reporter(options, done) as report:
        for step in range(done, options.steps):
            rate = set_learning_rate(optimizer, step, options)
            with (
                recorded(mesh, options.out) if step == done + 1 else ExitStack()
            ):  # the first step also sets up things
                loss = loss_of(model, *corpus.training(step))
                loss.backward()
                norm = platform.clip_grad_norm_(model.parameters(), options.clip)
                optimizer.step()
                optimizer.zero_grad()
                facts = {
                    "step": step + 1,
                    "loss": loss.item(),
                    "rate": rate,
                    "norm": float(norm),
                }
            if is_due(step + 1, options.evaluate_every, options.steps):
                facts["held_out"] = evaluate(model, corpus, options.evaluate_batches)
            report(facts)
            if is_due(step + 1, options.save_every, options.steps):
                checkpoints.save(
                    step + 1, {**state, "options": to_keep(options)}
                )  # it is written while training goes on
        checkpoints.wait()
    return model


def loss_of(model: Llama, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the whole batch, of which this process has these rows."""
    logits = model(ids.to(platform.device()))
    with loss_parallel():
        return F.cross_entropy(
            logits.flatten(0, 1), targets.to(platform.device()).flatten()
        )


@torch.no_grad()
def evaluate(model: Llama, corpus: Corpus, batches: int) -> float:
    """The mean loss on text that is never trained on."""
    return (
        sum(
            loss_of(model, *corpus.held_out(number)).item() for number in range(batches)
        )
        / batches
    )


def new_optimizer(model: Llama, options: Namespace) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95))


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, options: Namespace
) -> float:
    """Warm-up, then a half cosine down to a tenth, where it stays."""
    length = options.decay_steps or options.steps
    progress = min(
        1.0, max(0.0, (step - options.warmup) / max(1, length - options.warmup))
    )
    rate = (
        options.rate
        * min(1.0, (step + 1) / max(1, options.warmup))
        * (0.55 + 0.45 * math.cos(math.pi * progress))
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def latest(folder: Path) -> Path:
    """The newest checkpoint in a run's folder; a checkpoint itself is its own."""
    found = (
        folder
        if (folder / "checkpoint.json").exists()
        else CheckpointManager(folder).latest()
    )
    if found is None:
        raise FileNotFoundError(f"there is no checkpoint in {folder}")
    return found


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that is done every so many steps, and at the end, is done after this one."""
    return step == last or bool(every and step % every == 0)


@contextmanager
def recorded(mesh: Any, folder: Path) -> Iterator[None]:
    """Writes what is communicated in the context to a file."""
    with CommunicationLedger(mesh) as ledger:
        yield
    if platform.get_rank() == 0:
        (folder / "collectives.json").write_text(
            json.dumps([asdict(entry) for entry in ledger.entries])
        )


class Reporter:
    """A log of all steps, one JSON object a line, and a progress bar, or some lines where there is no terminal."""

    def __init__(self, options: Namespace, done: int):
        self._options = options
        self._is_first = platform.get_rank() == 0
        text = TextColumn(
            "loss {task.fields[loss]:.4f}, held out {task.fields[held_out]:.4f}"
        )
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            text,
            TimeRemainingColumn(),
        )
        self._bar.disable = not self._is_first or not self._bar.console.is_terminal
        what = f"mesh {options.mesh}" if options.mesh else "one process"
        self._task = self._bar.add_task(
            what, total=options.steps, completed=done, loss=math.nan, held_out=math.nan
        )

    def __enter__(self) -> "Reporter":
        if self._is_first:
            self._options.out.mkdir(parents=True, exist_ok=True)
            (self._options.out / "process.json").write_text(json.dumps(os.getpid()))
            self._log = (self._options.out / "log.jsonl").open(
                "a" if self._options.resume else "w", buffering=1
            )
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._is_first:
            self._log.close()

    def __call__(self, facts: dict[str, Any]) -> None:
        if not self._is_first:
            return
        self._log.write(json.dumps(facts) + "\n")
        self._bar.update(
            self._task,
            completed=facts["step"],
            **{k: v for k, v in facts.items() if k != "step"},
        )
        if self._bar.disable and is_due(
            facts["step"], max(1, self._options.steps // 10), self._options.steps
        ):
            told = f", held out {facts['held_out']:.4f}" if "held_out" in facts else ""
            print(f"step {facts['step']}: loss {facts['loss']:.4f}{told}", flush=True)


# --- options


def read_options(arguments: Sequence[str] | None = None) -> Namespace:
    """The command line. With --resume what the checkpoint says stands, unless it is given again."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=300, help="train until so many steps are done"
    )
    parser.add_argument(
        "--mesh", metavar="DPxTP", help="data-parallel times tensor-parallel ranks"
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="between the blocks the sequence is cut",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/llama"),
        help="folder of the log and the checkpoints",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on from a checkpoint, or the newest of a run",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=0,
        help="steps between checkpoints; always one at the end",
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=3,
        help="checkpoints, of which older ones are removed",
    )
    parser.add_argument("--evaluate-every", type=int, default=50)
    kept = parser.add_argument_group("kept in the checkpoint")
    kept.add_argument("--evaluate-batches", type=int, default=4)
    kept.add_argument(
        "--batch", type=int, default=8, help="sequences a step, of all ranks together"
    )
    kept.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    kept.add_argument("--warmup", type=int, default=50, help="steps until then")
    kept.add_argument(
        "--decay-steps",
        type=int,
        help="step at which the rate is lowest; --steps if not given",
    )
    kept.add_argument(
        "--clip", type=float, default=1.0, help="largest norm of all gradients together"
    )
    kept.add_argument(
        "--dtype", choices=["float32", "float64", "bfloat16"], default="float32"
    )
    kept.add_argument("--seed", type=int, default=0)
    for field in fields(Config):
        kind = (
            {"action": BooleanOptionalAction}
            if field.type is bool
            else {"type": field.type}
        )
        kept.add_argument(
            f"--{field.name.replace('_', '-')}", default=field.default, **kind
        )
    options = parser.parse_args(arguments)
    if options.resume:
        parser.set_defaults(**read_objects(latest(options.resume))["options"])
        options = parser.parse_args(arguments)
    return options


def to_keep(options: Namespace) -> dict[str, Any]:
    """What a run that goes on from here has to take over."""
    names = (
        "evaluate_batches",
        "batch",
        "rate",
        "warmup",
        "clip",
        "dtype",
        "seed",
        *vars(config_of(options)),
    )
    return {name: getattr(options, name) for name in names} | {
        "decay_steps": options.decay_steps or options.steps
    }


def config_of(options: Namespace) -> Config:
    """The sizes of the model."""
    return Config(
        **{field.name: getattr(options, field.name) for field in fields(Config)}
    )


def join(shape: str | None) -> Any:
    """The mesh of the processes that torchrun started, or None if this is the only one."""
    if "WORLD_SIZE" not in os.environ:
        if shape:
            raise SystemExit(
                f"--mesh {shape} needs several processes: start this with torchrun"
            )
        return None
    if platform.device().type != "cpu":
        torch.accelerator.set_device_index(platform.device())
    platform.init_process_group()
    dp, tp = (
        (int(ranks) for ranks in shape.split("x"))
        if shape
        else (1, platform.get_world_size())
    )
    return init_device_mesh(
        platform.device_type(), (dp, tp), mesh_dim_names=("dp", "tp")
    )


if __name__ == "__main__":
    chosen = read_options()
    train(chosen, join(chosen.mesh))
    platform.destroy_process_group()
