"""Queries, keys and values that a model copies: fused kernels on GPUs read them where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from attention_samples import attention_of, imitate_cuda, rewritten
from dispatch_samples import fresh_start
from torch.nn.functional import scaled_dot_product_attention

from fuseplan.planner.rewrites.attention import AttentionRewrites

pytestmark = pytest.mark.uncovered


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def heads(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = torch.randn(3, 2, 3, length, 8).unbind()
    return query, key, value


def projected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, copied: bool = True, written: bool = False
) -> torch.Tensor:
    """Heads as they come out of projections, and copies of them, as Whisper makes them."""
    rows = [one.transpose(1, 2).contiguous() * 2 for one in (query, key, value)]
    apart = [one.transpose(1, 2) for one in rows]
    read = [one.contiguous() if copied else one for one in apart]
    if written:
        rows[1].mul_(3)
    return scaled_dot_product_attention(*read).transpose(1, 2).reshape(query.shape[0], query.shape[2], -1) * 2


def test_operands_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch, lambda _: "flash")
    found = rewritten(projected, *heads(7))
    assert found.done == AttentionRewrites(uncopied_operands=1)
    (call,) = attention_of(found.module)
    assert all(call[name].meta["val"].stride(-1) == 1 and not call[name].meta["val"].is_contiguous()
               for name in ("query", "key", "value"))


@pytest.mark.parametrize("case", ["on a CPU", "by single ops", "another kernel", "no copies"])
def test_copies_of_operands_stay_where_they_may_matter(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"by single ops": lambda _: "math",
              "another kernel": lambda call: "flash" if call["query"].is_contiguous() else "efficient"}
    if case != "on a CPU":
        imitate_cuda(monkeypatch, chosen.get(case, lambda _: "flash"))
    assert rewritten(partial(projected, copied=case != "no copies"), *heads(7)).done == AttentionRewrites()


def test_what_is_written_to_after_it_was_copied_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch, lambda _: "flash")
    found = rewritten(partial(projected, written=True), *heads(7))
    (call,) = attention_of(found.module)
    assert call["key"].meta["val"].is_contiguous(), "the copy"
