# SPDX-License-Identifier: Apache-2.0
"""What people do around a model in training, done to one on a 2x2 mesh, against one process."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import DTensor, init_device_mesh
from hyper_parallel.core.tensor_parallel import loss_parallel
from hyper_parallel.testing import run_ranks
from model import Config, Llama
from plan import put_on_mesh

SIZES = Config(layers=2, dim=32, hidden=48, context=16, tied=True)


def one_device(dtype=torch.float64):
    torch.manual_seed(0)
    return Llama(SIZES).to(dtype)


class Pair:
    """A model on one device and its twin on the mesh, and a batch of which the twin sees its rows."""

    def __init__(self, sequence_parallel, one):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.one = one
        self.many = put_on_mesh(
            copy.deepcopy(one), self.mesh, sequence_parallel=sequence_parallel
        )
        torch.manual_seed(1)
        self.ids, self.targets = torch.randint(256, (2, 4, 16))
        self.targets[0, :9] = self.targets[3] = -100  # not as many count on each rank

    def losses(self, turn=0):
        """Of one device and of the mesh."""
        ids, rows = (
            self.ids.roll(turn),
            slice(
                2 * self.mesh.get_local_rank("dp"),
                2 * self.mesh.get_local_rank("dp") + 2,
            ),
        )
        with loss_parallel():
            return [
                F.cross_entropy(model(i).flatten(0, 1), t.flatten())
                for model, i, t in (
                    (self.one, ids, self.targets),
                    (self.many, ids[rows], self.targets[rows]),
                )
            ]

    def backward(self, turn=0, share=1.0):
        for loss in self.losses(turn):
            (loss * share).backward()

    def check_gradients(self, tolerance=1e-9):
        for (name, true), mine in zip(
            self.one.named_parameters(), self.many.parameters(), strict=True
        ):
            assert (mine.grad is None) == (true.grad is None), name
            if true.grad is not None:
                assert mine.grad.dtype == true.grad.dtype
                same(mine.grad, true.grad, tolerance, name)

    def check_parameters(self, tolerance):
        for (name, true), mine in zip(
            self.one.named_parameters(), self.many.parameters(), strict=True
        ):
            same(mine, true, tolerance, name)


def same(mine, true, tolerance=1e-9, what=""):
    whole = (mine.full_tensor() if isinstance(mine, DTensor) else mine).detach()
    torch.testing.assert_close(
        whole,
        true.detach(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda m: f"{what}: {m}",
    )


def frozen_parameters(sequence_parallel):
    one = one_device()
    for name, parameter in one.named_parameters():
        parameter.requires_grad_("mlp" in name)
    pair = Pair(sequence_parallel, one)
    pair.backward()
    pair.check_gradients()
    assert pair.many.embed.weight.grad is None


def several_backward_passes_and_clipping_by_torch(sequence_parallel):
    pair = Pair(sequence_parallel, one_device())
    for turn in range(3):
        pair.backward(turn, 1 / 3)
    pair.check_gradients()
    norms = [
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for model in (pair.one, pair.many)
    ]
    assert norms[0] > 0.1
    same(norms[1], norms[0])
    pair.check_gradients()


def evaluation(sequence_parallel):
    pair = Pair(sequence_parallel, one_device())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            true, mine = pair.losses()
        same(mine, true)


def autocast(sequence_parallel):
    pair = Pair(sequence_parallel, one_device(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        true, mine = pair.losses()
    assert mine.dtype == true.dtype
    same(mine, true, 2e-2)
    true.backward()
    mine.backward()
    pair.check_gradients(3e-2)


def another_dtype(sequence_parallel):
    pair = Pair(sequence_parallel, one_device())
    for model in (pair.one, pair.many):
        model.to(torch.bfloat16)
    true, mine = pair.losses()
    assert mine.dtype == true.dtype == torch.bfloat16
    same(mine, true, 5e-2)


def state_dicts(sequence_parallel):
    pair, other = (
        Pair(sequence_parallel, one_device()),
        Pair(sequence_parallel, one_device()),
    )
    with torch.no_grad():
        for parameter in other.many.parameters():
            parameter.zero_()
    other.many.load_state_dict(pair.many.state_dict())
    same(other.losses()[1], pair.losses()[0])
    twin = one_device()
    twin.load_state_dict(
        {name: value.full_tensor() for name, value in pair.many.state_dict().items()}
    )
    for name, value in pair.one.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name


def optimizers(sequence_parallel):
    for make in (
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.NAdam(p, 1e-2),
    ):
        pair = Pair(sequence_parallel, one_device())
        both = [make(model.parameters()) for model in (pair.one, pair.many)]
        for turn in range(4):
            for optimizer in both:
                optimizer.zero_grad(set_to_none=turn % 2 == 0)
            pair.backward(turn)
            for optimizer in both:
                optimizer.step()
        pair.check_parameters(1e-6)


def recomputed_blocks(sequence_parallel):
    pair = Pair(sequence_parallel, one_device())
    for block in pair.many.blocks:
        usual = block.forward
        block.forward = lambda x, rotary, usual=usual: checkpoint(
            usual, x, rotary, use_reentrant=False
        )
    pair.backward()
    pair.check_gradients()


def module_hooks(sequence_parallel):
    pair, seen = Pair(sequence_parallel, one_device()), []
    for model in (pair.one, pair.many):
        model.blocks[0].mlp.register_full_backward_hook(
            lambda _, into, out: seen.append((into[0], out[0]))
        )
        model.blocks[1].register_forward_hook(lambda _, __, out: seen.append((out,)))
    pair.backward()
    true, mine = (
        [found for found in seen if isinstance(found[0], DTensor) == wanted]
        for wanted in (False, True)
    )
    assert [len(found) for found in mine] == [len(found) for found in true] == [1, 2]
    for theirs, ours in zip(true, mine, strict=True):
        for expected, found in zip(theirs, ours, strict=True):
            same(found, expected)


def averages_of_weights(sequence_parallel):
    pair = Pair(sequence_parallel, one_device())
    averages = [
        AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for m in (pair.one, pair.many)
    ]
    for turn in range(3):
        with torch.no_grad():
            for model in (pair.one, pair.many):
                for parameter in model.parameters():
                    parameter.mul_(1.0 + turn)
        for average, model in zip(averages, (pair.one, pair.many), strict=True):
            average.update_parameters(model)
    for true, mine in zip(
        averages[0].parameters(), averages[1].parameters(), strict=True
    ):
        same(mine, true)


HABITS = [
    frozen_parameters,
    several_backward_passes_and_clipping_by_torch,
    evaluation,
    autocast,
    another_dtype,
    state_dicts,
    optimizers,
    recomputed_blocks,
    module_hooks,
    averages_of_weights,
]


@pytest.mark.parametrize(
    "sequence_parallel", [False, True], ids=["whole", "sequence parallel"]
)
@pytest.mark.parametrize(
    "habit", HABITS, ids=lambda habit: habit.__name__.replace("_", " ")
)
def test_it_is_as_on_one_device(habit, sequence_parallel):
    run_ranks(habit, 4, sequence_parallel, timeout=120)
