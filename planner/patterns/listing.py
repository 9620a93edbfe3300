"""The named patterns in words: what a listing and a message say of each. Needs no PyTorch, so that listing is quick."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Listed:
    """A pattern in words.

    Attributes:
        summary: Its formula.
        dims: What the dimensions of its shape mean.
        example: A shape.
        ranks: The numbers of dimensions that it takes.
    """

    summary: str
    dims: str = "rows x columns (or batch x rows x columns)"
    example: str = "32x4096"
    ranks: tuple[int, ...] = (2, 3)


_ANY = ("any", "1024x1024", (1, 2, 3))
_HEADS = ("batch x heads x tokens x head dimension", "1x32x128x64", (4,))
_SCORES = ("... x queries x keys", "1x32x128x128", (2, 3, 4))
_ROUTING = ("tokens x experts", "32x128", (2,))


def _quantised() -> Iterator[tuple[str, Listed]]:
    for name in ("rms_norm", "add_rms_norm", "swiglu"):
        for target in ("fp8", "int8"):
            for scale, words in (("token", "a scale for each row"), ("tensor", "one given scale")):
                yield f"{name}_{target}_{scale}", Listed(f"{name} quantised to {target} with {words}")


#: By name.
LISTING: Mapping[str, Listed] = MappingProxyType({
    "swiglu": Listed("silu(gate) * up"),
    "geglu": Listed("gelu(gate) * up, with erf"),
    "geglu_tanh": Listed("gelu(gate) * up, with tanh"),
    "soft_cap": Listed("30 * tanh(x / 30)"),
    "pointwise_chain": Listed("11 pointwise ops in a row", *_ANY),
    "sin_chain": Listed("sin((x + 1) * 2)", "any", "10000000", (1, 2, 3)),
    "rms_norm": Listed("x / sqrt(mean(x^2) + eps) * weight"),
    "add_rms_norm": Listed("h = residual + x; h and rms_norm(h)"),
    "rms_norm_gemma": Listed("x / sqrt(mean(x^2) + eps) * (1 + weight), in fp32"),
    "add_rms_norm_gemma": Listed("h = residual + x; h and Gemma's rms_norm(h)"),
    "norm_add_norm_gemma": Listed("h = residual + rms_norm(x); h and rms_norm(h), both Gemma's"),
    "residual_chain": Listed("h = the sum of four branches; h and rms_norm(h)"),
    "embedding_rms_norm": Listed(
        "h = embedding(ids, table); h and rms_norm(h)", "tokens x vocabulary x columns", "32x32000x4096", (3,)),
    "layer_norm": Listed("(x - mean) / sqrt(var + eps) * weight + bias"),
    "rope": Listed("x cos + rotate(x) sin, pairs half a head apart", *_HEADS),
    "rope_interleaved": Listed("x cos + rotate(x) sin, neighbouring pairs", *_HEADS),
    "rope_partial": Listed("rope of the first half of each head", *_HEADS),
    "rope_partial_interleaved": Listed("rope_interleaved of the first half of each head", *_HEADS),
    "qk_norm_rope": Listed("rope of the RMSNorm of each head of q and k", *_HEADS),
    "softmax": Listed("exp(x - max(x)) / sum(exp(x - max(x))), in fp32"),
    "causal_softmax": Listed("softmax(scores / 8, later keys masked)", *_SCORES),
    "soft_cap_softmax": Listed("softmax(50 * tanh(scores / 16 / 50), later keys masked)", *_SCORES),
    "sampling_softmax": Listed("softmax(logits / temperature of the row)", "rows x vocabulary", "8x128256"),
    "moe_softmax": Listed("top-k of softmax(logits), made to sum to 1", *_ROUTING),
    "moe_sigmoid": Listed("sigmoid(logits) at the top-k of sigmoid(logits) + bias, made to sum to 2.5", *_ROUTING),
    **dict(_quantised()),
    "dequantise_int8": Listed("int8 weight * scale of its channel", "output x input channels", "4096x4096", (2,)),
    "dequantise_awq": Listed(
        "(int4 weight - zero) * scale, groups of 128", "input x output channels", "4096x4096", (2,)),
})
