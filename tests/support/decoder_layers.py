"""Decoder layers of the sizes of known models as a plain module, and calls of them: what checks of layers share.

Shared keys by ``enable_gqa``, static caches, no head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fuseplan.planner.tuning.session import open_session

#: Places of a static cache.
HELD = 1024
#: Keys and values of a layer, [batch, shared heads, places, width].
Cache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a decoder layer."""

    hidden: int
    heads: int
    shared: int
    width: int
    inner: int
    normed_heads: bool = False
    #: Gemma's: norms behind attention and MLP as well, and GELU.
    normed_results: bool = False


MODELS = {
    "llama": Sizes(4096, 32, 8, 128, 14336),
    "qwen3": Sizes(4096, 32, 8, 128, 12288, normed_heads=True),
    "phi3": Sizes(3072, 32, 32, 96, 8192),
    "gemma3": Sizes(2560, 8, 4, 256, 10240, normed_heads=True, normed_results=True),
    "tiny": Sizes(64, 4, 2, 16, 96, normed_heads=True, normed_results=True),
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed: torch.Tensor = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return normed


def places_read(at: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of a token at a place of static caches: those up to it."""
    return None if at is None else (torch.arange(HELD, device=at.device) <= at)[None, None, None]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        wide, narrow = sizes.heads * sizes.width, sizes.shared * sizes.width
        self.before, self.after = Norm(sizes.hidden), Norm(sizes.hidden)
        self.q = nn.Linear(sizes.hidden, wide, bias=False)
        self.k = nn.Linear(sizes.hidden, narrow, bias=False)
        self.v = nn.Linear(sizes.hidden, narrow, bias=False)
        self.o = nn.Linear(wide, sizes.hidden, bias=False)
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)
        if sizes.normed_heads:
            self.q_norm, self.k_norm = Norm(sizes.width), Norm(sizes.width)
        made = (Norm(sizes.hidden) if sizes.normed_results else nn.Identity() for _ in range(2))
        self.behind = nn.ModuleList(made)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        at: torch.Tensor | None,
        cache: Cache,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.before(x)
        q = self.q(h).view(batch, length, -1, self.sizes.width)
        k = self.k(h).view(batch, length, -1, self.sizes.width)
        v = self.v(h).view(batch, length, -1, self.sizes.width).transpose(1, 2)
        if self.sizes.normed_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q.transpose(1, 2), cos, sin), rotated(k.transpose(1, 2), cos, sin)
        if at is not None:
            k, v = cache[0].index_copy_(2, at, k), cache[1].index_copy_(2, at, v)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=at is None, enable_gqa=True)
        x = x + self.behind[0](self.o(a.transpose(1, 2).reshape(batch, length, -1)))
        h = self.after(x)
        gate = self.gate(h)
        gate = F.gelu(gate, approximate="tanh") if self.sizes.normed_results else F.silu(gate)
        result: torch.Tensor = x + self.behind[1](self.down(gate * self.up(h)))
        return result

    def bare(self, x: torch.Tensor, at: torch.Tensor | None, cache: Cache) -> torch.Tensor:
        """The matmuls and attention alone, one after another."""
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, -1, self.sizes.width).transpose(1, 2) for one in (self.q, self.k, self.v))
        if at is not None:
            k, v = cache
        a = F.scaled_dot_product_attention(q, k, v, is_causal=at is None, enable_gqa=True)
        o = self.o(a.transpose(1, 2).reshape(batch, length, -1))
        self.gate(o)
        down: torch.Tensor = self.down(self.up(o))
        return down


class Layers(nn.Module):
    def __init__(self, sizes: Sizes, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(count))

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor | None, caches: list[Cache]
    ) -> torch.Tensor:
        mask = places_read(at)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cos, sin, at, cache, mask)
        return x

    def bare(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor | None, caches: list[Cache]
    ) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            x = layer.bare(x, at, cache)
        return x


def example(
    sizes: Sizes, count: int, batch: int, length: int, device: str, dtype: torch.dtype, place: int = HELD - 1
) -> tuple[Any, ...]:
    """A call: one token at a place of the caches, or a prompt."""
    torch.manual_seed(0)
    made = {"device": device, "dtype": dtype}
    x = torch.randn(batch, length, sizes.hidden, **made)  # type: ignore[call-overload]
    cos, sin = (torch.randn(1, 1, length, sizes.width, **made) for _ in range(2))  # type: ignore[call-overload]
    at = torch.tensor([place], device=device) if length == 1 else None
    held = HELD if length == 1 else 0
    caches = [
        tuple(torch.randn(batch, sizes.shared, held, sizes.width, **made) for _ in range(2))  # type: ignore[call-overload]
        for _ in range(count)
    ]
    return x, cos, sin, at, caches


def probe_once(device: str, database: str) -> None:
    """Measure the device where the database does not know it: what is tuned in a first call is priced by that."""
    session = open_session(device, database)
    if session.spec is None:
        session.probed()
    session.database.close()
