"""Short rows put in order on a GPU: as stable sorts do it, and with the experts that ATen's ``topk`` takes of ties."""

from __future__ import annotations

import pytest
import torch
from short_rows_samples import faults, run

pytestmark = pytest.mark.gpu


def test_places_and_elements() -> None:
    assert not [one for one in faults("cuda") if one["wrong"]][:3]


@pytest.mark.parametrize(("rows", "columns"), [(257, 8), (257, 64), (257, 128), (31, 512)])
def test_of_equal_elements_it_keeps_those_that_aten_keeps(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    source = (torch.randn(rows, columns) * 2).round() / 2  # experts' logits in bfloat16 are often equal
    attrs = {"k": min(8, columns - 1), "dim": -1, "largest": True, "sorted": True}
    (own,) = run(source, "aten.topk.default", attrs, (1,), "cuda")
    theirs = torch.topk(source.cuda(), attrs["k"]).indices.cpu()
    assert torch.equal(own.sort(-1).values, theirs.sort(-1).values)
