"""What jobs leave behind in their process."""

from __future__ import annotations

import pytest
import torch

from fuseplan.search.workers import jobs


@pytest.mark.gpu
def test_memory_that_is_free_is_left_to_other_processes() -> None:
    large = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_reserved()
    del large
    jobs.release()
    assert torch.cuda.memory_reserved() <= held - 2**28
