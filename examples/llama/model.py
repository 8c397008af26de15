"""A language model as Llama is one, for one device: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The sizes of a model."""

    vocab: int = 256  # bytes
    dim: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4  # every key and value serves heads / kv_heads queries
    hidden: int = 344
    context: int = 128  # the longest sequence
    theta: float = 10000.0  # the slowest rotation takes about so many positions
    tied: bool = False  # whether embedding and head are one matrix


class Llama(nn.Module):
    """Logits of the next token for every token."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.rotary = Rotary(config.dim // config.heads, config.context, config.theta)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.apply(_initialise)
        for block in (
            self.blocks
        ):  # what adds to the residual stream starts smaller, the more there is of it
            for matrix in (block.attention.wo, block.mlp.down):
                nn.init.normal_(matrix.weight, std=0.02 / (2 * config.layers) ** 0.5)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and MLP, each on the normed stream and added to it."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm, self.mlp_norm = (
            nn.RMSNorm(config.dim, eps=1e-5) for _ in range(2)
        )
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: "Rotary") -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal attention; several heads of queries share one of keys and values."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: "Rotary") -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(
            rotary(q), rotary(k), v, is_causal=True, enable_gqa=True
        )
        return self.wo(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate, self.up = (
            nn.Linear(config.dim, config.hidden, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Rotary(nn.Module):
    """Turns each pair of a head's dims by an angle that grows with the position."""

    def __init__(self, head_dim: int, context: int, theta: float):
        super().__init__()
        speeds = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(context), speeds)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # batch, heads, sequence, head_dim
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = x.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return turned.to(x.dtype)  # the tables may be more precise


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
