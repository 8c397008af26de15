# SPDX-License-Identifier: Apache-2.0
"""``verify`` of what was typed into the cells of a notebook, which is in no file."""

import linecache
import threading

import pytest

from hyper_parallel.verification.typed_in import TypedIn, is_typed_in

CELLS = [
    "import torch\nfrom torch import nn\nfrom hyper_parallel import ColwiseParallel, RowwiseParallel, verify",
    "WIDTH = 8\n\ndef activation(x):\n    return torch.tanh(x)",
    """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.down(activation(self.up(x)))


class Model(Block):
    pass_through = True

    def forward(self, x):
        return x + super().forward(x)
""",
    """
def make_model():
    return Model()

def batch():
    return (torch.randn(4, 4),)

def loss(model, x):
    return model(x).pow(2).mean()
""",
    'plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}',
]


class Notebook:
    """Runs cells as IPython does: each under a name of its own, with its source in ``linecache``."""

    def __init__(self, kind):
        self.kind, self.count = kind, 0
        self.names = {"__name__": "__main__"}

    def run(self, text):
        self.count += 1
        name = f"<{self.kind}-{self.count}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), self.names)


@pytest.fixture
def notebook(request):
    made = Notebook(request.node.name)
    for cell in CELLS:
        made.run(cell)
    return made


def test_a_plan_is_verified_from_a_notebook(notebook):
    notebook.run(
        'report = verify(make_model, plan, "tp=2", batch, loss=loss)\nreport.check()'
    )
    notebook.run(
        'report = verify(Model, plan, "tp=2", batch, loss=loss)\nreport.check()'
    )
    wrong = 'verify(make_model, {"up": ColwiseParallel(), "down": ColwiseParallel()}, "tp=2", batch, loss=loss)'
    notebook.run(f"wrong = {wrong}")
    assert not notebook.names["wrong"].ok


def test_what_is_sent(notebook):
    sent = TypedIn.of(notebook.names["make_model"])
    assert list(sent.definitions) == ["activation", "Block", "Model", "make_model"]
    assert sent.modules == {"torch": "torch", "nn": "torch.nn"}
    assert sent.values == {"WIDTH": 8}
    model = sent.load()()
    assert model.up.out_features == 8
    assert not is_typed_in(Notebook)  # which is in this file


def test_what_cannot_be_sent_is_named(notebook):
    notebook.names["lock"] = threading.Lock()
    notebook.run("def broken():\n    return lock\n\nanonymous = lambda: 0")
    with pytest.raises(
        ValueError, match="broken refers to lock, which cannot be sent.*HP711"
    ):
        TypedIn.of(notebook.names["broken"])
    with pytest.raises(
        ValueError, match="must be defined by a statement at the level of its cell"
    ):
        TypedIn.of(notebook.names["anonymous"])
