"""The model of model.py in MindSpore, for one device: the same parts under the same names."""

from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.mint.nn import functional as F  # noqa: N812 - everyone's name for it


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


class Llama(nn.Cell):
    """Logits of the next token for every token."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.blocks = nn.CellList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim)
        self.head = mint.nn.Linear(config.dim, config.vocab, bias=False)

    def construct(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Embedding(mint.nn.Embedding):
    """The rows of a table; mint's own operator has no kernel for CPUs."""

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.weight, ids, 0)


class RMSNorm(nn.Cell):
    """Divides by the root of the mean square."""

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(dim, np.float32)))
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        return (
            x
            * mint.rsqrt(mint.mean(x * x, dim=-1, keepdim=True) + self.eps)
            * self.weight
        )


class Block(nn.Cell):
    """Attention and MLP, each on the normed stream and added to it."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(config.dim), RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Cell):
    """Causal attention; several heads of queries share one of keys and values."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.groups = config.heads // config.kv_heads
        self.wq = mint.nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = mint.nn.Linear(
            config.dim, config.kv_heads * self.head_dim, bias=False
        )
        self.wv = mint.nn.Linear(
            config.dim, config.kv_heads * self.head_dim, bias=False
        )
        self.wo = mint.nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        speeds = config.theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.outer(np.arange(config.context), speeds).astype(np.float32)
        self.register_buffer("cos", Tensor(np.cos(angles)), persistent=False)
        self.register_buffer("sin", Tensor(np.sin(angles)), persistent=False)
        later = np.triu(np.ones((config.context, config.context), bool), 1)
        self.register_buffer("later", Tensor(later), persistent=False)

    def construct(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (self._heads(w(x)) for w in (self.wq, self.wk, self.wv))
        k, v = (
            ops.repeat_interleave(y, self.groups, 1) if self.groups > 1 else y
            for y in (k, v)
        )
        scores = (
            mint.matmul(self._turned(q), mint.transpose(self._turned(k), 2, 3))
            / self.head_dim**0.5
        )
        scores = scores.masked_fill(self.later[:length, :length], float("-inf"))
        y = mint.matmul(F.softmax(scores, dim=-1), v)
        return self.wo(mint.flatten(mint.transpose(y, 1, 2), 2))

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return mint.transpose(x.reshape(batch, length, -1, self.head_dim), 1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        """Each pair of a head's dims, turned by an angle that grows with the position."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = mint.chunk(x, 2, -1)
        return mint.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Cell):
    """SwiGLU."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = mint.nn.Linear(config.dim, config.hidden, bias=False)
        self.up = mint.nn.Linear(config.dim, config.hidden, bias=False)
        self.down = mint.nn.Linear(config.hidden, config.dim, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
