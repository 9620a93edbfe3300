"""Calls of every op that has a recipe, on odd shapes, strides and broadcasts."""

from __future__ import annotations

from typing import Any

import torch

from fuseplan.planner.graph.dataflow import Ref

torch.manual_seed(0)
X = torch.randn(3, 5, 7)
P = X.abs() + 0.1
T = torch.randn(7, 5, 3).permute(2, 1, 0)  # same shape, other strides
ROW = torch.randn(7)
COL = torch.randn(5, 1)
EDGE = torch.randn(3, 1, 7).expand(3, 5, 7)  # stride 0
COUNTS = torch.randint(0, 9, (3, 5, 7))
MORE = torch.randint(0, 9, (5, 7))
HALVES = torch.arange(-7, 8) / 2
WORDS = torch.randint(-(2**31), 2**31, (3, 5, 7), dtype=torch.int32)
BYTES = torch.randint(-128, 128, (3, 5, 7), dtype=torch.int8)
SHIFTS = torch.tensor([0, 1, 4, 31, 32, 99, -1])
BITWISE = [f"{left}{name}{right}" for name in ("and", "or", "xor") for left, right in (("bitwise_", ""), ("__", "__"))]
SHIFTED = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
TAILS = torch.tensor([-1e4, -200.0, -90.0, -20.0, -1e-3, -0.0, 1e-30, 1e-3, 1.0, 19.0, 20.0, 21.0, 90.0, 1e4])
TIES = torch.randint(-2, 3, (3, 5, 7)).float()
HOLES = torch.where(torch.rand(3, 5, 7) < 0.1, torch.nan, torch.where(X > 1, torch.inf, X))
IMAGE = torch.randn(2, 6, 3, 5) + 0.5
GAIN = torch.randn(6)
B = X > 0
C = T > 0

#: Held only beside another op, which says how large they all are (``test_bags.py``).
BAGS = frozenset({"aten.embedding_bag.default", "aten.embedding_bag.padding_idx"})
#: (op, operands, attributes): at least one per other recipe.
SAMPLES: list[tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]] = [
    *((f"aten.{name}.default", (X,), {}) for name in ("exp", "exp2", "sin", "cos", "tanh", "sigmoid", "erf", "neg",
                                                      "abs", "floor", "ceil", "relu", "silu", "square")),
    ("aten.round.default", (HALVES,), {}),
    *((f"aten.{name}.default", (P,), {}) for name in ("log", "sqrt", "rsqrt", "reciprocal")),
    ("aten.exp.default", (T,), {}),
    ("aten.add.Tensor", (X, T), {}),
    ("aten.add.Tensor", (X, ROW), {"alpha": 2}),
    ("aten.add.Tensor", (COUNTS, MORE), {}),
    ("aten.add.Tensor", (COUNTS, X), {}),
    ("aten.add.Scalar", (X,), {"other": 1.5}),
    ("aten.add.Tensor", (COUNTS,), {"other": 3}),
    ("aten.sub.Tensor", (X, COL), {}),
    ("aten.sub.Scalar", (X,), {"other": 2.0}),
    ("aten.mul.Tensor", (COL, ROW), {}),
    ("aten.mul.Tensor", (EDGE, T), {}),
    ("aten.mul.Scalar", (X,), {"other": -0.5}),
    ("aten.div.Tensor", (X, P), {}),
    ("aten.div.Tensor", (COUNTS, MORE + 1), {}),
    ("aten.div.Scalar", (X,), {"other": 3.0}),
    ("aten.div.Tensor", (X,), {"other": 8.0}),
    ("aten.true_divide.Tensor", (X, P), {}),
    ("aten.true_divide.Scalar", (X,), {"other": 7.0}),
    ("aten.maximum.default", (X, T), {}),
    ("aten.minimum.default", (X, T), {}),
    ("aten.max.other", (X, T), {}),
    ("aten.max.other", (COUNTS, MORE), {}),
    ("aten.min.other", (X, COL), {}),
    ("aten.floor_divide.default", (COUNTS - 4,), {"other": 3}),
    ("aten.floor_divide.default", (WORDS,), {"other": -7}),
    ("aten.floor_divide.Scalar", (BYTES,), {"other": 2}),
    ("aten.div.Scalar_mode", (COUNTS - 4,), {"other": 3, "rounding_mode": "floor"}),
    ("aten.div.Tensor_mode", (COUNTS - 4,), {"other": -3, "rounding_mode": "floor"}),
    ("aten.rsub.Scalar", (X,), {"other": 1.0, "alpha": 3}),
    ("aten.rsub.Tensor", (X, T), {}),
    *(("aten.pow.Tensor_Scalar", (P,), {"exponent": e}) for e in (2, 3, 1, 0.5, -0.5, -1, 1.7)),
    ("aten.pow.Tensor_Tensor", (P, X), {}),
    ("aten.pow.Scalar", (X,), {"self": 2.0}),
    ("aten.gelu.default", (X,), {}),
    *((f"aten.{name}.default", (X * 4,), {}) for name in ("relu6", "hardsigmoid", "hardswish", "mish", "leaky_relu")),
    ("aten.leaky_relu.default", (X,), {"negative_slope": 0.3}),
    ("aten.log_sigmoid.default", (TAILS,), {}),
    ("aten.softplus.default", (TAILS,), {}),
    ("aten.softplus.default", (TAILS,), {"beta": 2.5, "threshold": 3}),
    ("aten.log1p.default", (TAILS.abs(),), {}),
    ("aten.gelu.default", (X,), {"approximate": "tanh"}),
    ("aten.clamp.default", (X,), {"min": -0.5, "max": 0.5}),
    ("aten.clamp.default", (X,), {"max": 0.1}),
    ("aten.clamp_min.default", (X,), {"min": 0.2}),
    ("aten.clamp_max.default", (X,), {"max": 0.2}),
    ("aten.hardtanh.default", (X,), {"min_val": -0.3, "max_val": 0.6}),
    *((f"aten.{name}.Tensor", (X, T), {}) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *((f"aten.{name}.Scalar", (COUNTS,), {"other": 4}) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    ("aten.lt.Scalar", (COUNTS,), {"other": 3.5}),
    ("aten.le.Tensor", (COUNTS, MORE), {}),
    *((f"aten.logical_{name}.default", (B, C), {}) for name in ("and", "or", "xor")),
    *((f"aten.bitwise_{name}.Tensor", (B, C), {}) for name in ("and", "or", "xor")),
    *((f"aten.__{name}__.Tensor", (B, C), {}) for name in ("and", "or", "xor")),
    ("aten.logical_not.default", (B,), {}),
    ("aten.logical_not.default", (X,), {}),
    ("aten.bitwise_not.default", (B,), {}),
    *((f"aten.{packet}.Tensor", (BYTES, BYTES.flip(0)), {}) for packet in BITWISE),
    *((f"aten.{packet}.Scalar", (BYTES,), {"other": 15}) for packet in BITWISE),
    ("aten.bitwise_not.default", (BYTES,), {}),
    ("aten.bitwise_not.default", (BYTES.to(torch.uint8),), {}),
    *((f"aten.{packet}.Tensor", (WORDS, SHIFTS.to(torch.int32)), {}) for packet in SHIFTED),
    ("aten.bitwise_left_shift.Tensor", (BYTES, SHIFTS.to(torch.int8)), {}),
    *((f"aten.bitwise_{side}_shift.Tensor_Scalar", (WORDS,), {"other": 4}) for side in ("left", "right")),
    *((f"aten.__{side}shift__.Scalar", (COUNTS,), {"other": 2}) for side in ("l", "r")),
    ("aten.where.self", (B, X, ROW), {}),
    ("aten.where.ScalarSelf", (B, X), {"self": 1.0}),
    ("aten.where.ScalarOther", (B, X), {"other": -1.0}),
    ("aten.where.Scalar", (B,), {"self": 1.0, "other": 0.25}),
    ("aten.masked_fill.Scalar", (X, B), {"value": -3.0}),
    ("aten.masked_fill.Tensor", (X, B, torch.tensor(2.0)), {}),
    ("aten.to.dtype", (COUNTS,), {"dtype": "float32"}),
    ("aten.to.dtype", (X,), {"dtype": "int64"}),
    ("aten.to.dtype", (X.round(),), {"dtype": "bool"}),
    ("aten.to.dtype", (X * 30,), {"dtype": "int8"}),
    *(("aten.to.dtype", (WORDS,), {"dtype": dtype}) for dtype in ("int8", "uint8", "int16")),
    ("aten.to.dtype", (WORDS.long() << 20,), {"dtype": "int8"}),
    ("aten.to.dtype", (X * 100,), {"dtype": "float8_e4m3fn"}),
    ("aten.to.dtype", (X.to(torch.float8_e4m3fn),), {"dtype": "float32"}),
    ("aten.to.dtype_layout", (B,), {"dtype": "float32"}),
    ("aten.to.device", (X,), {"device": "cpu", "dtype": "float64"}),
    ("aten.to.other", (COUNTS, X), {}),
    ("aten._to_copy.default", (T,), {"dtype": "float64"}),
    ("aten.type_as.default", (COUNTS, X), {}),
    ("aten.clone.default", (T,), {"memory_format": "contiguous_format"}),
    ("aten.clone.default", (EDGE,), {}),
    ("aten.contiguous.default", (T,), {}),
    ("aten.lift_fresh_copy.default", (X,), {}),
    ("aten.dropout.default", (X,), {"p": 0.1, "train": False}),
    ("aten.full.default", (), {"size": (3, 4), "fill_value": 2.5}),
    ("aten.zeros.default", (), {"size": (3, 4)}),
    ("aten.ones.default", (), {"size": (2, 127)}),
    ("aten.full_like.default", (T,), {"fill_value": -1.5}),
    ("aten.zeros_like.default", (X,), {}),
    ("aten.ones_like.default", (X,), {}),
    ("aten.new_zeros.default", (X,), {"size": (4,)}),
    ("aten.new_ones.default", (X,), {"size": (4, 1)}),
    ("aten.new_full.default", (X,), {"size": (4,), "fill_value": 3.0}),
    ("aten.scalar_tensor.default", (), {"s": 4.0}),
    ("aten.arange.default", (), {"end": 127}),
    ("aten.arange.start", (), {"start": 3, "end": 20}),
    ("aten.arange.start_step", (), {"start": 1, "end": 20, "step": 3}),
    ("aten.tril.default", (X,), {}),
    ("aten.tril.default", (X,), {"diagonal": -2}),
    ("aten.triu.default", (X,), {"diagonal": 1}),
    ("aten.cat.default", (X, T), {"dim": -1}),
    ("aten.cat.default", (X, X[:, :, :2], T), {"dim": 2}),
    ("aten.cat.default", (X, T), {"dim": 0}),
    ("aten.concat.default", (X, X[:, 1:]), {"dim": 1}),
    ("aten.stack.default", (X, T), {"dim": -1}),
    ("aten.stack.default", (X, T), {"dim": 1}),
    ("aten.embedding.default", (X.reshape(15, 7), COUNTS[0]), {}),
    ("aten.embedding.default", (T[0], COUNTS[0, 0].clamp(max=4)), {"padding_idx": 1}),
    ("aten.index_select.default", (T, torch.tensor([2, 0, 2])), {"dim": 0}),
    ("aten.index_select.default", (X, torch.tensor([6, 1], dtype=torch.int32)), {"dim": -1}),
    ("aten.gather.default", (X, COUNTS[:2, :3] % 7), {"dim": 2}),
    ("aten.gather.default", (T, COUNTS % 5), {"dim": 1}),
    ("aten.index.Tensor", (X, torch.tensor([2, 0, -1, 1])), {"indices": (Ref(1),)}),
    ("aten.index.Tensor", (T, torch.tensor([[4, -5], [0, 1]])), {"indices": (None, Ref(1))}),
    ("aten.index.Tensor", (T, torch.tensor([[4, -5], [0, 1]]), COUNTS[0, 0, :2] % 7), {
        "indices": (None, Ref(1), Ref(2))}),
    ("aten.index.Tensor", (X, torch.tensor([[2], [0]]), torch.tensor([-3, 6, 0])), {"indices": (Ref(1), None, Ref(2))}),
    ("aten.index.Tensor", (B, torch.tensor([1, 0]), torch.tensor([-1, 3], dtype=torch.int32)), {
        "indices": (Ref(1), Ref(2))}),
    ("aten.diff.default", (X,), {}),
    ("aten.diff.default", (T, X[:, :2]), {"dim": 1, "append": None}),
    ("aten.diff.default", (T, X[:2]), {"dim": 0, "prepend": None}),
    ("aten.diff.default", (COUNTS, COUNTS[:, :, :1], COUNTS[:, :, :3]), {}),
    ("aten.pad.default", (T,), {"pad": (1, 2), "value": 0.5}),
    ("aten.pad.default", (X,), {"pad": (0, 0, 0, 3, 1, 0), "mode": "constant", "value": None}),
    ("aten.pad.default", (X,), {"pad": (-2, 3, 2, -1)}),
    ("aten.constant_pad_nd.default", (COUNTS,), {"pad": (0, 5), "value": 7}),
    ("aten.repeat.default", (T,), {"repeats": (1, 2, 3)}),
    ("aten.repeat.default", (ROW,), {"repeats": (4, 1, 2)}),
    *((f"aten.{name}.default", (-HOLES,), {}) for name in ("isnan", "isinf", "isposinf", "isneginf")),
    ("aten.nan_to_num.default", (HOLES,), {"nan": 1.5, "posinf": 3.0, "neginf": -2.0}),
    ("aten.sign.default", (HOLES,), {}),
    *((f"aten.{name}.default", (X * 4,), {}) for name in (
        "sign", "sgn", "trunc", "fix", "frac", "deg2rad", "rad2deg", "hardshrink", "softshrink", "elu", "celu")),
    ("aten.sign.default", (COUNTS - 4,), {}),
    ("aten.elu.default", (TAILS,), {"alpha": 1.5, "scale": 1.25, "input_scale": 0.5}),
    ("aten.celu.default", (TAILS,), {"alpha": 2.5}),
    *((f"aten.{name}.default", (EDGE,), {"lambd": 0.25}) for name in ("hardshrink", "softshrink")),
    ("aten.threshold.default", (X,), {"threshold": 0.1, "value": -2.0}),
    ("aten._prelu_kernel.default", (X, COL), {}),
    ("aten.glu.default", (X[:, :4],), {"dim": 1}),
    ("aten.glu.default", (T[..., :2],), {}),
    ("aten.lerp.Scalar", (X, T), {"weight": 0.3}),
    ("aten.lerp.Scalar", (X, T), {"weight": 0.8}),
    ("aten.lerp.Tensor", (X, T, X.flip(0)), {}),
    ("aten.addcmul.default", (X, T, ROW), {"value": 0.5}),
    ("aten.addcdiv.default", (X, T, P), {}),
    ("aten.clamp.Tensor", (X, T, T + 0.5), {}),
    ("aten.clamp.Tensor", (X, T), {"min": None}),
    ("aten.clamp.Tensor", (X, COL), {"max": None}),
    ("aten.clamp_min.Tensor", (X, T), {}),
    ("aten.clamp_max.Tensor", (X, T), {}),
    ("aten.remainder.Scalar", (COUNTS - 4,), {"other": 3}),
    ("aten.remainder.Scalar", (COUNTS - 4,), {"other": -3}),
    ("aten.flip.default", (X,), {"dims": (0, -1)}),
    ("aten.flip.default", (T,), {"dims": (1,)}),
    ("aten.std.correction", (X,), {"dim": (-1,), "correction": 1}),
    ("aten.std.correction", (T,), {"dim": (-1,), "correction": 0, "keepdim": True}),
    *((f"aten.{name}.dim", (B,), {"dim": -1}) for name in ("any", "all")),
    *((f"aten.{name}.dims", (X.round(),), {"dim": (1, 2), "keepdim": True}) for name in ("any", "all")),
    *((f"aten.{name}.default", (ROW,), {}) for name in ("any", "all")),
    *(("aten.linalg_vector_norm.default", (X,), {"ord": order, "dim": (-1,)}) for order in (2, 1)),
    ("aten.linalg_vector_norm.default", (X,), {"dim": (1, 2), "keepdim": True}),
    ("aten.logsumexp.default", (TAILS,), {"dim": (-1,)}),
    ("aten.logsumexp.default", (X,), {"dim": (2,), "keepdim": True}),
    ("aten.roll.default", (X,), {"shifts": (-2, 100), "dims": (-1, 0)}),
    ("aten.roll.default", (T,), {"shifts": (4,)}),
    *((f"aten.upsample_nearest{dims}d.vec", (torch.randn(2, 3, *(3, 5, 2)[:dims]),), {
        "output_size": None, "scale_factors": (2.0, 4.0, 2.0)[:dims]}) for dims in (1, 2, 3)),
    *((f"aten.upsample_nearest{dims}d.default", (torch.randn(2, 3, *(3, 5, 2)[:dims]),), {
        "output_size": (6, 20, 2)[:dims]}) for dims in (1, 2, 3)),
    *(("aten.conv2d.default", (
        torch.randn(2, channels, 5, 7).to(memory_format=torch.channels_last),
        torch.randn(channels * times, 1, *window), *((torch.randn(channels * times),) if biased else ())),
        ({} if biased else {"bias": None}) | {
            "stride": steps, "padding": margins, "dilation": spread, "groups": channels})
      for channels, times, window, steps, margins, spread, biased in (
          (3, 1, (3, 3), (1, 1), (1, 1), (1, 1), True), (4, 2, (3, 1), (2, 1), (0, 2), (1, 1), False),
          (127, 1, (2, 3), (3, 2), (2, 4), (2, 3), True), (2, 3, (5, 5), (1, 2), (2, 2), (1, 1), False))),
    *((op, (torch.randn(2, channels, 8, 7).to(memory_format=torch.channels_last),), {
        "kernel_size": window, "stride": steps, "padding": margins})
      for op in ("aten.max_pool2d.default", "aten.avg_pool2d.default") for channels, window, steps, margins in (
          (3, (3, 3), (2, 2), (1, 1)), (127, (2, 3), (), (0, 1)), (2, (5, 5), (1, 3), (2, 2)))),
    *(("aten.group_norm.default", (
        torch.randn(2, channels, 3, 5).to(memory_format=torch.channels_last), torch.randn(channels)), {
        "num_groups": groups, "bias": None}) for channels, groups in ((6, 2), (6, 6), (6, 1), (127, 127), (4, 2))),
    *((f"aten.upsample_bilinear2d.{kind}", (torch.randn(2, 3, 3, 5).to(memory_format=torch.channels_last),), {
        "output_size": size, "align_corners": False, **scales})
      for kind, size, scales in (
          ("vec", (6, 5), {"scale_factors": None}), ("default", (3, 40), {}),
          ("vec", None, {"scale_factors": (4.0, 2.0)}), ("default", (12, 20), {"scales_h": 4.0, "scales_w": None}))),
    ("aten.upsample_bilinear2d.vec", (torch.randn(1, 127, 1, 2).to(memory_format=torch.channels_last),), {
        "output_size": (8, 16), "align_corners": False, "scale_factors": None}),
    ("aten.conv2d.default", (
        torch.randn(1, 14, 1, 16).to(memory_format=torch.channels_last)[:, :7], torch.randn(7, 1, 1, 4)), {
        "bias": None, "stride": (1, 1), "padding": (0, 3), "dilation": (1, 1), "groups": 7}),
    ("aten.max_pool2d.default", (torch.randn(1, 3, 9, 9).to(memory_format=torch.channels_last),), {
        "kernel_size": (2,), "stride": (1,), "dilation": (3,)}),
    ("aten.repeat_interleave.self_int", (X,), {"repeats": 2, "dim": -1}),
    ("aten.repeat_interleave.self_int", (T,), {"repeats": 3, "dim": 1}),
    ("aten.repeat_interleave.self_int", (T,), {"repeats": 2}),
    ("aten.reshape.default", (T,), {"shape": (15, 7)}),
    ("aten._unsafe_view.default", (X,), {"size": (15, 7)}),
    ("aten.flatten.using_ints", (T,), {"start_dim": 0, "end_dim": 1}),
    ("aten.reshape_as.default", (T, X.reshape(7, 15)), {}),
    ("aten.sum.dim_IntList", (X,), {"dim": (-1,), "keepdim": True}),
    ("aten.sum.dim_IntList", (T,), {"dim": (2,)}),
    ("aten.sum.dim_IntList", (EDGE,), {"dim": (2,)}),
    ("aten.sum.dim_IntList", (X,), {"dim": (1,)}),
    ("aten.sum.dim_IntList", (T,), {"dim": (0,), "keepdim": True}),
    ("aten.sum.dim_IntList", (COUNTS,), {"dim": (-2,)}),
    ("aten.sum.dim_IntList", (T.transpose(0, 2).unsqueeze(1),), {"dim": (2, 3)}),
    ("aten.sum.dim_IntList", (IMAGE,), {"dim": (3, -2), "keepdim": True}),
    ("aten.sum.default", (X,), {}),
    ("aten.mean.default", (X,), {}),
    ("aten.max.default", (X,), {}),
    ("aten.min.default", (COUNTS,), {}),
    ("aten.prod.default", (X,), {}),
    ("aten.prod.dim_int", (T,), {"dim": 1}),
    ("aten.prod.dim_int", (COUNTS,), {"dim": -1, "keepdim": True}),
    ("aten.softmax.int", (X,), {"dim": 1}),
    ("aten.log_softmax.int", (X,), {"dim": 1, "dtype": "float64"}),
    ("aten.log_softmax.int", (T,), {"dim": 0}),
    ("aten.mean.dim", (IMAGE.to(memory_format=torch.channels_last),), {"dim": (2, 3)}),
    ("aten.var.correction", (IMAGE,), {"dim": (0, 1), "correction": 1}),
    ("aten.logsumexp.default", (X,), {"dim": (1, 0), "keepdim": True}),
    ("aten.argmax.default", (TIES.unsqueeze(0),), {"dim": None}),
    ("aten.amax.default", (X,), {"dim": (1,)}),
    ("aten.argmax.default", (TIES,), {"dim": -1}),
    ("aten.argmax.default", (HOLES,), {"dim": -1, "keepdim": True}),
    ("aten.argmax.default", (COUNTS,), {"dim": 2}),
    ("aten.argmin.default", (TIES,), {"dim": -1}),
    ("aten.argmin.default", (HOLES,), {"dim": -1}),
    ("aten.argmin.default", (ROW,), {"dim": None}),
    ("aten.amax.default", (X,), {"dim": (-1,)}),
    ("aten.amin.default", (X,), {"dim": (2,), "keepdim": True}),
    ("aten.mean.dim", (X,), {"dim": (-1,), "keepdim": True}),
    ("aten.mean.dim", (ROW,), {"dim": (0,)}),
    ("aten.mean.dim", (IMAGE,), {"dim": (2, 3)}),
    ("aten.mean.dim", (IMAGE[:, 1:4],), {"dim": (-1, -2), "keepdim": True}),
    ("aten.adaptive_avg_pool2d.default", (IMAGE,), {"output_size": (1, 1)}),
    ("aten.var.correction", (X,), {"dim": (-1,), "correction": 1, "keepdim": True}),
    ("aten.var.correction", (X,), {"dim": (-1,), "correction": 0}),
    ("aten.var.dim", (X,), {"dim": (-1,), "unbiased": False}),
    ("aten.softmax.int", (X,), {"dim": -1}),
    ("aten.special_softmax.default", (T,), {"dim": -1}),
    ("aten._softmax.default", (X,), {"dim": 2, "half_to_float": False}),
    ("aten.log_softmax.int", (X,), {"dim": -1}),
    ("aten._log_softmax.default", (X,), {"dim": 2, "half_to_float": False}),
    ("aten.layer_norm.default", (X, ROW, ROW + 1), {"normalized_shape": (7,), "eps": 1e-5}),
    ("aten.layer_norm.default", (T,), {"normalized_shape": (7,), "weight": None, "bias": None}),
    ("aten.layer_norm.default", (X, X[0], X[1]), {"normalized_shape": (5, 7), "eps": 1e-5}),
    ("aten.group_norm.default", (IMAGE, GAIN, GAIN + 1), {"num_groups": 2, "eps": 1e-5}),
    ("aten.group_norm.default", (IMAGE, GAIN), {"num_groups": 3, "bias": None}),
    ("aten.group_norm.default", (IMAGE[:, :, 0, 0].clone(),), {"num_groups": 1, "weight": None, "bias": None}),
    ("aten.group_norm.default", (IMAGE[:, :, 0].clone(),), {"num_groups": 6, "weight": None, "bias": None}),
    ("aten.batch_norm.default", (IMAGE, GAIN, GAIN + 1, GAIN - 1, GAIN.abs()), {
        "training": False, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": True}),
    ("aten.batch_norm.default", (IMAGE[:, :, 0, 0], GAIN, GAIN.abs()), {
        "weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-3, "cudnn_enabled": False}),
    ("aten.rms_norm.default", (X, ROW), {"normalized_shape": (7,), "eps": 1e-6}),
    ("aten.rms_norm.default", (X.double(),), {"normalized_shape": (7,), "weight": None}),
]
