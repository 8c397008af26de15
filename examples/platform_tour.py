"""Shows the platform at work between the processes that torchrun starts: `make tour` runs it on four."""

import torch
from torch import nn

from hyper_parallel import CommunicationError, get_platform

platform = get_platform()
platform.init_process_group(timeout=60)
rank, ranks = platform.get_rank(), platform.get_world_size()


def say(title, what):
    """Prints what every rank has to say, in the order of the ranks."""
    everyone = [None] * ranks
    platform.all_gather_object(everyone, str(what))
    if rank == 0:
        print(
            f"\n{title}",
            *(f"  rank {r}: {text}" for r, text in enumerate(everyone)),
            sep="\n",
            flush=True,
        )


say(
    "Who is here",
    f"{platform.platform_type.name} on {platform.device()}, talking over {platform.get_backend()}",
)

total = platform.all_reduce(torch.tensor([float(rank)]), None).item()
pair = platform.create_group([rank - rank % 2, rank - rank % 2 + 1])
partners = platform.all_gather_into_tensor(torch.tensor([rank]), pair).tolist()
say(
    "Groups are made by their members alone",
    f"the sum of all ranks is {total:g}, my pair is {partners}",
)

# Rank i sends i + j rows to rank j: token counts as in a mixture of experts.
sends = [rank + j for j in range(ranks)]
tokens = torch.full((sum(sends), 2), float(rank), requires_grad=True)
received = platform.differentiable_all_to_all_single(
    tokens, sends, [i + rank for i in range(ranks)], None
)
received.pow(2).sum().backward()
say("An exchange of uneven pieces, and the gradient back", f"sent {sends}, got {len(received)} rows, "
    f"gradient right: {torch.equal(tokens.grad, 2 * tokens.detach())}")  # fmt: skip

torch.manual_seed(0)
with platform.init_on_device(platform.meta_device):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
before = model[0].weight.device
platform.init_parameters(model, 0)
torch.manual_seed(0)
reference = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
same = all(
    torch.equal(a, b)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True)
)
say(
    "Parameters made without memory, then drawn as on one device",
    f"on {before} before, bit-equal after: {same}",
)

# Data parallel by hand: each rank a quarter of the batch, gradients averaged while backward still runs.
batch, target = torch.randn(8, 16), torch.randn(8, 4)
step = platform.ckpt_wrapper(model)
optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    inputs, labels = (platform.chunk(t, 0, ranks, rank) for t in (batch, target))
    loss = nn.functional.mse_loss(step(inputs), labels)
    loss.backward()
    for parameter in step.parameters():
        platform.set_grad_reduce_handle(
            platform.all_reduce(parameter.grad, None, async_op=True, op="avg")[1]
        )
    platform.wait_grad_handle()
    norm = platform.clip_grad_norm_(step, 1.0)
    optimizer.step()
optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    nn.functional.mse_loss(reference(batch), target).backward()
    platform.clip_grad_norm_(reference, 1.0)
    optimizer.step()
worst = max(
    (a - b).abs().max().item()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True)
)
say(
    "Twenty steps of data parallel by hand, with recompute",
    f"largest difference from one process {worst:.0e}",
)
assert worst < 1e-5

memory = platform.get_symmetric_memory_handler()
board = memory.empty(ranks)
shared = memory.rendezvous(board)
for r in range(ranks):
    shared.get_buffer(r, (ranks,), torch.float32)[rank] = (
        rank + 1
    )  # straight into the other's memory
shared.barrier()
say("Memory that every rank writes directly", board.tolist())

impatient = platform.split_group(None, [list(range(ranks))], timeout=1)
error = "I did not come"
if rank != 1:
    try:
        platform.all_reduce(torch.ones(1), impatient)
    except CommunicationError as caught:
        error = str(caught).split(". ")[0]
say("A rank that never comes is named, and nobody hangs", error)
platform.destroy_process_group()
