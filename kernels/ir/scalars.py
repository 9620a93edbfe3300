"""Numbers that change from call to call, as arguments of kernels.

A kernel takes integers. A float travels as the bits of the float32 that kernels, like ATen's, compute with; the op
``as_float`` (:mod:`fuseplan.kernels.ir.ops`) makes it a float again.
"""

from __future__ import annotations

import struct

_FLOAT, _INT = struct.Struct("<f"), struct.Struct("<i")


def float32_bits(value: float) -> int:
    """The bits of the nearest float32 as a signed 32-bit integer; infinite where it is too large.

    >>> hex(float32_bits(1.0)), float32_bits(-0.0) == -(2**31)
    ('0x3f800000', True)
    """
    try:
        packed = _FLOAT.pack(value)
    except OverflowError:
        packed = _FLOAT.pack(float("inf") if value > 0 else float("-inf"))
    return int(_INT.unpack(packed)[0])


def float_of_bits(bits: int) -> float:
    """The float that :func:`float32_bits` packed.

    >>> float_of_bits(float32_bits(0.25))
    0.25
    """
    return float(_FLOAT.unpack(_INT.pack(bits))[0])
