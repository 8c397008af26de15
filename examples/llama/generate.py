"""Writes text with a trained model: python examples/llama/generate.py build/llama --prompt "def " """

from argparse import ArgumentParser
from pathlib import Path

import torch

from hyper_parallel.core import distributed_checkpoint
from hyper_parallel.core.distributed_checkpoint import read_objects
from model import Config, Llama
from train import latest


@torch.no_grad()
def generate(
    model: Llama, prompt: str, length: int, temperature: float = 0.7, seed: int = 0
) -> str:
    """The prompt and so many bytes that the model would go on with."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(tokens[:, -model.config.context :])[0, -1, :256]  # bytes alone
        next_token = torch.multinomial(
            (logits / temperature).softmax(-1), 1, generator=generator
        )
        tokens = torch.cat([tokens, next_token[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def load(folder: Path) -> Llama:
    """The model of a checkpoint, on the CPU of this process, however it was trained: by hand or from a recipe."""
    objects = read_objects(folder)
    options = (
        objects["run"]["recipe"]["model"]["arguments"]
        if "run" in objects
        else objects["options"]
    )
    model = Llama(
        Config(
            **{
                name: options[name]
                for name in Config.__dataclass_fields__
                if name in options
            }
        )
    )
    distributed_checkpoint.load({"model": model}, checkpoint_id=folder)
    return model


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or the folder of a run"
    )
    parser.add_argument("--prompt", default="class ")
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = load(latest(given.checkpoint))
    print(generate(found, given.prompt, given.length, given.temperature, given.seed))
