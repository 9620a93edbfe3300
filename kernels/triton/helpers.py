"""Device functions that generated Triton modules may call, by the names the op table spells.

They are text, not ``@triton.jit`` functions of this module: a generated module holds those it uses, so that it can be
read, cached, interpreted and compiled without fuseplan.
"""

from __future__ import annotations

import re

# Where two numbers share a register, ptxas 12.9 takes the upper one out before it widens it: two instructions, not one.
_FLOAT_OF_BFLOAT16 = '''
@triton.jit
def _float_of_bfloat16(x):
    """The same number: a bfloat16 is the upper half of a float32."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
'''

# What is joined stays in one thread, beside itself; so should be what takes one word apart, but not all of a group.
_REPEATED = '''
@triton.jit
def _repeated(x, rows: tl.constexpr, cols: tl.constexpr):
    """Each element of a block as a block of ``rows`` x ``cols``, powers of two."""
    height: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    # Joins need no shared memory. Those of few elements came out wrong on a GPU (Triton 3.6, one warp, 16 columns).
    if cols > 8 or (cols > 1 and width * cols < 64):
        x = tl.reshape(tl.broadcast_to(x[:, :, None], (height, width, cols)), (height, width * cols))
    elif cols > 1:
        x = tl.join(x, x)
        if cols > 2:
            x = tl.join(x, x)
        if cols > 4:
            x = tl.join(x, x)
        x = tl.reshape(x, (height, width * cols))
    if rows > 1:
        x = tl.reshape(tl.broadcast_to(x[:, None, :], (height, rows, width * cols)), (height * rows, width * cols))
    return x
'''

# An assertion calls a function, and ptxas has tensor cores wait for each product in a kernel that calls one (C7510).
_TRAP_UNLESS = '''
@triton.jit
def _trap_unless(inside, mask=True):
    """Stop the device where ``inside`` is false, except for lanes that the ``mask`` excuses."""
    outside = (tl.where(inside, False, True) & mask).to(tl.int32)
    tl.inline_asm_elementwise("{ .reg .pred stop; setp.ne.s32 stop, $1, 0; @stop trap; mov.b32 $0, $1; }", "=r,r",
                              [outside], dtype=tl.int32, is_pure=False, pack=1)
'''

_FLOORDIV = '''
@triton.jit
def _floordiv(a, b):
    """Integer division that rounds toward minus infinity."""
    quotient = a // b
    remainder = a - quotient * b
    return quotient - ((remainder != 0) & ((remainder < 0) != (b < 0))).to(quotient.dtype)
'''

_REMAINDER = '''
@triton.jit
def _remainder(a, b):
    """Integer remainder with the sign of the divisor."""
    remainder = a % b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)
'''

# On an NVIDIA GPU exp2 and rsqrt of a float32 are one instruction each; exp takes five and a quotient eight, because of
# subnormal operands. The square of an inverse root is as accurate as that quotient, within 2 units in the last place,
# where the divisor is positive: 1 + exp(x) is at least 1, and infinity gives 0.
_EXP = '''
@triton.jit
def _exp(x):
    """Exponential; subnormal float32 results are flushed to zero."""
    if x.dtype == tl.float64:
        result = tl.exp(x)
    else:
        result = tl.exp2(x * 1.4426950408889634)
    return result
'''

_SIGMOID = '''
@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x))."""
    if x.dtype == tl.float64:
        result = 1.0 / (1.0 + tl.exp(-x))
    else:
        root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
        result = root * root
    return result
'''

# What rounding 1 + x loses, over 1 + x, is what the logarithm lacks.
_LOG1P = '''
@triton.jit
def _log1p(x):
    """Logarithm of 1 + x, accurate for small x too."""
    u = 1.0 + x
    usual = (u > 0.0) & (u < float("inf"))
    lost = (x - (u - 1.0)) / tl.where(usual, u, 1.0)
    return tl.where(x == 0.0, x, tl.log(u) + tl.where(usual, lost, 0.0))  # x keeps the sign of a zero
'''

# Rational and polynomial approximations below 0.625: Cephes tanh and tanhf (Moshier). Above: 1 - 2 / (1 + exp(2|x|)).
_TANH = '''
@triton.jit
def _tanh(x):
    """Hyperbolic tangent, accurate to a few units in the last place for small arguments too."""
    size = tl.abs(x)
    z = x * x
    if x.dtype == tl.float64:
        large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
        top = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
        bottom = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
        small = x + x * z * (top / bottom)
    else:
        root = tl.rsqrt(tl.exp2(size * 2.8853900817779268) + 1.0)
        large = 1.0 - 2.0 * root * root
        series = (-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2
        small = x + x * z * ((series * z + 1.33314422036e-1) * z - 3.33332819422e-1)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))
'''

# Minimax fits of this project (as in the C++ back end): erf(t) / t - 1 in t^2 below 0.7, -log2(erfc(t)) / t above.
_ERF = '''
@triton.jit
def _erf(x):
    """Error function, within 3 units in the last place."""
    if x.dtype == tl.float64:
        result = tl.erf(x)
    else:
        t = tl.minimum(tl.abs(x), 3.95, propagate_nan=tl.PropagateNan.ALL)
        z = t * t
        p = (0.004264653194695711 * z - 0.026459477841854095) * z + 0.11276596039533615
        small = ((p * z - 0.3761218786239624) * z + 0.12837912142276764) * t + t
        q = (-0.0003105506475549191 * t + 0.004655268508940935) * t - 0.03308303281664848
        q = ((q * t + 0.15196026861667633) * t + 0.9170684814453125) * t + 1.6281262636184692
        large = 1.0 - tl.exp2(-(q * t))
        size = tl.where(t < 0.7, small, large)
        result = tl.where(x < 0, -size, size)
    return result
'''

# Beyond half the mantissa every float is an integer; below, adding 1.5 * 2^23 (2^52) leaves no room for a fraction.
_ROUND = '''
@triton.jit
def _round(x):
    """The nearest integer, ties to even."""
    if x.dtype == tl.float64:
        whole = (x + 6755399441055744.0) - 6755399441055744.0
        near = tl.abs(x) < 2251799813685248.0
    else:
        whole = (x + 12582912.0) - 12582912.0
        near = tl.abs(x) < 4194304.0
    return tl.where(near, whole, x)
'''

_POW = '''
@triton.jit
def _pow(base, exponent):
    """Power with C semantics, evaluated in double precision."""
    x = base.to(tl.float64)
    y = exponent.to(tl.float64)
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    negative = tl.where(whole, tl.where(odd, -size, size), float("nan"))
    result = tl.where(x < 0, negative, size)
    return tl.where(y == 0, 1.0, tl.where(x == 1, 1.0, result)).to(base.dtype)
'''

# Polynomials: Cephes sinf and cosf (Moshier); the parts of pi / 2: fdlibm. CUDA's own would inline a slow path with a
# local array for every element, which takes seconds to compile. Above 2^20 the products count on fused multiply-adds.
_TURN = '''
@triton.jit
def _{function}(x):
    """{title} of an angle below 2^50, which is reduced in double precision by a quarter turn in three parts."""
    if x.dtype == tl.float64:
        result = tl.{function}(x)
    else:
        wide = x.to(tl.float64)
        turns = tl.floor(wide * 0.6366197723675814 + 0.5)
        rest = (wide - turns * 1.5707963267341256) - turns * 6.077100506303966e-11
        rest = (rest - turns * 2.0222662487959506e-21).to(tl.float32)
{shift}        quarter = (turns - 4.0 * tl.floor(turns * 0.25)).to(tl.float32)
        z = rest * rest
        odd = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * rest + rest
        even = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
        value = tl.where((quarter == 1.0) | (quarter == 3.0), even, odd)
        result = {result}
    return result
'''
_SIGNED = "tl.where(quarter >= 2.0, -value, value)"
_SIN = _TURN.format(function="sin", title="Sine", shift="", result=f"tl.where(x == 0.0, x, {_SIGNED})")
_COS = _TURN.format(function="cos", title="Cosine", shift=" " * 8 + "turns = turns + 1.0\n", result=_SIGNED)

_PAIR = '''
@triton.jit
def {name}(a, b):
    return tl.{function}(a, b, propagate_nan=tl.PropagateNan.ALL)
'''
_PRODUCT = '''
@triton.jit
def _product(a, b):
    return a * b
'''
# Of equal numbers, infinite ones too, the difference is 0. As in _LOG1P, what 1 + share loses is added again.
_LOGADDEXP = '''
@triton.jit
def _logaddexp(a, b):
    """log(exp(a) + exp(b)); of what is NaN, NaN."""
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    share = _exp(tl.where(a == b, 0.0, tl.minimum(a, b) - top))
    u = 1.0 + share
    return top + (tl.log(u) + (share - (u - 1.0)) / u)
'''
_FOLD = '''
@triton.jit
def {name}(x, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """{title} along ``axis``; of what is NaN, NaN."""
    return tl.reduce(x, axis, {pair}, keep_dims=keep_dims)
'''
_SCAN = '''
@triton.jit
def {name}(x, axis: tl.constexpr):
    """{title} up to and with each element along ``axis``; NaN after what is NaN."""
    return tl.associative_scan(x, axis, {pair})
'''

#: Helper -> its source, each after what it calls.
_HELPERS = {
    re.findall(r"def (\w+)", source)[0]: source
    for source in (
        _FLOAT_OF_BFLOAT16, _REPEATED, _TRAP_UNLESS, _FLOORDIV, _REMAINDER, _EXP, _SIGMOID, _LOG1P, _TANH, _ERF, _ROUND,
        _POW, _SIN, _COS,
        _PAIR.format(name="_larger", function="maximum"),
        _FOLD.format(name="_row_max", title="Maximum", pair="_larger"),
        _PAIR.format(name="_smaller", function="minimum"),
        _FOLD.format(name="_row_min", title="Minimum", pair="_smaller"),
        _PRODUCT,
        _FOLD.format(name="_row_prod", title="Product", pair="_product"),
        _LOGADDEXP,
        _FOLD.format(name="_row_logaddexp", title="Logarithm of the sum of exponentials", pair="_logaddexp"),
        _SCAN.format(name="_scan_max", title="Maximum", pair="_larger"),
        _SCAN.format(name="_scan_min", title="Minimum", pair="_smaller"),
        _SCAN.format(name="_scan_logaddexp", title="Logarithm of the sum of exponentials", pair="_logaddexp"),
    )
}

_PLAIN_FOLD = '''
def _row_{function}(x, axis, keep_dims):
    has_nan = ntl.max(ntl.where(x != x, 1, 0), axis, keep_dims=keep_dims)
    found = ntl.{function}(x, axis, keep_dims=keep_dims)
    return ntl.where(has_nan > 0, float("nan"), found)
'''


def plain_helper_sources(code: str) -> list[str]:
    """The helpers that ``code`` calls, as plain functions for ninetoothed, which inlines them into the application.

    It inlines a call only where it is all of an assignment's right-hand side, and knows positional arguments only. A
    fold cannot take a combining function of one's own, so that NaN is looked for beside the fold.
    """
    sources: list[str] = []
    for name in _HELPERS:
        if re.search(rf"(?<![\w.]){name}\b", code):
            fold = name.startswith("_row_")
            plain = _PLAIN_FOLD.format(function=name[-3:]) if fold else _HELPERS[name]
            plain = plain.replace("@triton.jit\n", "")
            plain = re.sub(r'    """.*?"""\n', "", plain, flags=re.DOTALL)
            sources.append(re.sub(r"\btl\.", "ntl.", plain).strip())
    return sources


def helper_sources(code: str) -> list[str]:
    """Sources of the helpers that ``code`` calls, directly or not, in an order that defines before use."""
    needed: set[str] = set()
    pending = [code]
    while pending:
        text = pending.pop()
        for name, source in _HELPERS.items():
            if name not in needed and re.search(rf"(?<![\w.]){name}\b", text):
                needed.add(name)
                pending.append(source)
    return [_HELPERS[name].strip() for name in _HELPERS if name in needed]
