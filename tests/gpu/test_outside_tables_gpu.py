"""An index outside its table on a GPU: a device-side assertion as in eager mode, each in a process of its own.

Kernels that use tensor cores trap instead, which is another error of the same type.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.faulty(alone=False)]

PROGRAM = Path(__file__).parents[1] / "support" / "outside_on_gpu.py"


def said(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments], capture_output=True, text=True, check=False,
        timeout=300,
    )
    return done.stdout.strip() or done.stderr[-2000:]


@pytest.mark.parametrize("number", ["inside", "-1", "length", "far"])
@pytest.mark.parametrize("how", ["eager", "fused", "graph", "ninetoothed"])
@pytest.mark.parametrize("name", ["embedding", "gather", "index_select", "x[i]", "computed", "cache", "projected"])
def test_an_index_outside_its_table_is_an_assertion(name: str, how: str, number: str) -> None:
    wraps = number == "-1" and name in ("x[i]", "computed")
    fails = ["device-side assert", *(["launch failure"] if name == "projected" and how in ("fused", "graph") else [])]
    assert said(name, how, number) in (["right"] if number == "inside" or wraps else fails)


@pytest.mark.parametrize("number", ["inside", "-1", "length"])
@pytest.mark.parametrize("name", ["embedding", "gather", "x[i]", "scatter", "index_put"])
def test_what_torchinductor_may_run_asserts_as_eager_mode(name: str, number: str) -> None:
    wraps = number == "-1" and name in ("x[i]", "index_put")
    assert said(name, "inductor", number) == ("right" if number == "inside" or wraps else "device-side assert")


@pytest.mark.parametrize("how", ["eager", "fused"])
@pytest.mark.parametrize("number", ["inside", "-1", "length"])
@pytest.mark.parametrize("name", ["pages", "pages by index_select"])
def test_a_page_that_does_not_exist_is_an_assertion(name: str, number: str, how: str) -> None:
    wraps = number == "-1" and name == "pages"
    assert said(name, how, number) == ("right" if number == "inside" or wraps else "device-side assert")


@pytest.mark.parametrize("how", ["eager", "fused", "graph"])
def test_decoding_past_a_static_cache_is_an_assertion(how: str) -> None:
    fails = ("device-side assert",) if how == "eager" else ("device-side assert", "launch failure")
    assert said("full cache", how, "length") in [f"{how} after 3 tokens" for how in fails]
