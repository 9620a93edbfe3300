"""Tune a module of your own on this machine, compile it, and see what that bought. Takes seconds on a CPU.

What was tuned is kept in your tuning database, so a second run measures nothing. Where fuseplan was never used before,
it measures the machine first.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

import fuseplan


class FeedForward(nn.Module):
    """A norm, a gated feed-forward layer, and a residual: what fuses best in a decoder."""

    def __init__(self, width: int = 128, inner: int = 256) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(silu(self.gate(normal)) * self.up(normal))


def main() -> None:
    torch.manual_seed(0)
    model, x = FeedForward().eval(), torch.randn(32, 128)
    print(fuseplan.tune(model, x, device="cpu", trials=2, seconds=0.5))

    fast = torch.compile(model, backend="fuseplan")
    with torch.no_grad():
        expected, found = model(x), fast(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    print(f"largest difference to eager: {(found - expected).abs().max():.1e}")
    print(fuseplan.stats())


if __name__ == "__main__":
    main()
