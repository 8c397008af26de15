"""Writes text with a trained model: python examples/llama/generate.py build/llama --prompt "def " """

from argparse import ArgumentParser
from pathlib import Path

import torch

import checkpoint
from model import Config, Llama


@torch.no_grad()
def generate(model: Llama, prompt: str, length: int, temperature: float = 0.7, seed: int = 0) -> str:
    """The prompt and so many bytes that the model would go on with."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(tokens[:, -model.config.context :])[0, -1, :256]  # bytes alone
        next_token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, next_token[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def load(folder: Path) -> Llama:
    """The model of a checkpoint, on the CPU of this process, however it was trained."""
    options = checkpoint.read_facts(folder)["options"]
    model = Llama(Config(**{name: options[name] for name in Config.__dataclass_fields__}))
    checkpoint.load(folder, model)
    return model


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run")
    parser.add_argument("--prompt", default="class ")
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = load(checkpoint.latest(given.checkpoint))
    print(generate(found, given.prompt, given.length, given.temperature, given.seed))
