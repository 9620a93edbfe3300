"""What every back end shares of the contract."""

from __future__ import annotations

from fuseplan.kernels.ir.backend import config_key


def test_a_config_s_key_ignores_the_order_of_its_names() -> None:
    assert config_key({"b": 2, "a": "x"}) == config_key({"a": "x", "b": 2}) == "a=x,b=2"
