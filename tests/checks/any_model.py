"""Models that nobody tuned for, beside eager mode and TorchInductor's default: one line of code, and tuned on the spot.

    python tests/checks/any_model.py [--tune] [--small] [--profile] [--device cuda|cpu] [NAMES]

One interleaved run a model, launched from Python and, on a GPU, in a CUDA graph; medians in microseconds a call.
Weights are random. Says how long each first call took and how far results are from eager mode's. With ``--tune`` each
model is tuned as ``plan tune --module`` does it, into the user's database. ``--small``, and a CPU, take few layers and
small sizes. ``--profile`` lists the kernels that take longest on a GPU. pytest does not collect it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._inductor.async_compile
import torch.nn.functional as F
import transformers as hf
from torch import nn

import fuseplan.planner
import fuseplan.planner.api.tune as tune_module

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
ROUNDS, SAMPLE_US = 9, 15000.0


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Models:
    """Makes a model and what it is called with."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small or device == "cpu"
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def _made(self, config: Any, kind: str) -> Any:
        with torch.device(self.device):
            model = getattr(hf, kind)(config).to(self.dtype)
        return self._initialised(model)

    @staticmethod
    def _initialised(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.02)
        return model.eval()

    def _ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(3, 1000, shape, device=self.device)

    def gpt2(self) -> Made:
        config = hf.GPT2Config(n_embd=1024, n_layer=1 if self.small else 12, n_head=16)
        return self._made(config, "GPT2LMHeadModel"), (), {
            "input_ids": self._ids(*(1, 128) if self.small else (4, 512)), "use_cache": False}

    def bert(self) -> Made:
        model = self._made(hf.BertConfig(num_hidden_layers=1 if self.small else 12), "BertForMaskedLM")
        mask = torch.ones_like(ids := self._ids(*(2, 64) if self.small else (32, 128)))
        mask[::3, 100:] = 0
        return model, (), {"input_ids": ids, "attention_mask": mask}

    def whisper(self) -> Made:
        config = hf.WhisperConfig(
            d_model=768, encoder_layers=1 if self.small else 6, decoder_layers=2, encoder_attention_heads=12,
            decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)
        return self._made(config, "WhisperModel").encoder, (self._floats(1 if self.small else 8, 80, 3000),), {}

    def convnext(self) -> Made:
        return self._images(hf.ConvNextConfig(), "ConvNextForImageClassification")

    def resnet(self) -> Made:
        return self._images(hf.ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512]),
                            "ResNetForImageClassification")

    def swin(self) -> Made:
        return self._images(hf.SwinConfig(depths=[2, 2, 2, 2] if self.small else [2, 2, 6, 2]),
                            "SwinForImageClassification")

    def vit(self) -> Made:
        return self._images(hf.ViTConfig(num_hidden_layers=2 if self.small else 12), "ViTForImageClassification")

    def _images(self, config: Any, kind: str) -> Made:
        return self._made(config, kind), (self._floats(1 if self.small else 32, 3, 224, 224),), {}

    def t5(self) -> Made:
        layers = 1 if self.small else 6
        config = hf.T5Config(num_layers=layers, num_decoder_layers=layers, feed_forward_proj="gated-gelu")
        ids = self._ids(*(1, 64) if self.small else (8, 512))
        return self._made(config, "T5ForConditionalGeneration"), (), {
            "input_ids": ids, "decoder_input_ids": ids, "use_cache": False}

    def mamba(self) -> Made:
        config = hf.MambaConfig(hidden_size=256, num_hidden_layers=1 if self.small else 8, vocab_size=8192)
        return self._made(config, "MambaForCausalLM"), (), {"input_ids": self._ids(1, 16), "use_cache": False}

    def qwen(self) -> Made:
        config = hf.Qwen2Config(
            hidden_size=896, intermediate_size=4864, num_hidden_layers=2 if self.small else 24, num_attention_heads=14,
            num_key_value_heads=2, vocab_size=32768)
        return self._made(config, "Qwen2ForCausalLM"), (), {
            "input_ids": self._ids(1, 128 if self.small else 1024), "use_cache": False}

    def unet(self) -> Made:
        class Block(nn.Module):
            """Two convolutions with group norms, around a smaller picture."""

            def __init__(self, width: int, inner: nn.Module | None) -> None:
                super().__init__()
                self.norm, self.second = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
                self.conv, self.out = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
                self.down, self.inner = nn.Conv2d(width, 2 * width, 3, 2, 1), inner
                self.up = nn.Conv2d(2 * width, width, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.conv(F.silu(self.norm(x)))
                if self.inner is not None:
                    y = y + F.interpolate(self.up(self.inner(self.down(y))), scale_factor=2.0)
                return x + self.out(F.silu(self.second(y)))

        model = Block(32, Block(64, Block(128, None))).to(self.device, self.dtype)
        return self._initialised(model), (self._floats(1 if self.small else 16, 32, 64, 64),), {}

    def gcn(self) -> Made:
        class Graph(nn.Module):
            """Two layers of message passing by gathers and sums over edges."""

            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 16)

            def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                for layer in (self.first, self.second):
                    y = layer(x)
                    count = torch.zeros_like(y[:, 0]).index_add(0, target, torch.ones_like(target, dtype=y.dtype))
                    x = torch.zeros_like(y).index_add(0, target, F.relu(y)[source]) / count.clamp(min=1)[:, None]
                return x

        nodes, edges = (1000, 8000) if self.small else (20000, 200000)
        ends = (torch.randint(0, nodes, (edges,), device=self.device) for _ in range(2))
        return self._initialised(Graph().to(self.device, self.dtype)), (self._floats(nodes, 64), *ends), {}

    def statistics(self) -> Made:
        def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z = torch.sin((x + 1) * 2) * torch.sigmoid(y)
            z = (z - z.mean(0, keepdim=True)) / (z.std(0, keepdim=True) + 1e-5)
            return z.clamp(-1, 1).cumsum(-1), z.amax(-1), (z > 0).sum()

        size = 512 if self.small else 4096
        return Function(run), tuple(torch.randn(size, size, device=self.device) for _ in range(2)), {}

    def mlp(self) -> Made:
        layers = [one for _ in range(4) for one in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
        model = self._initialised(nn.Sequential(*layers).to(self.device, self.dtype))
        head = Function(lambda x: F.softmax(x, -1).sum(-2))
        return nn.Sequential(model, head), (self._floats(8 if self.small else 64, 200, 512),), {}

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


NAMES = [name for name in vars(Models) if not name.startswith("_")]


def tensor(result: Any) -> torch.Tensor:
    """The result that is compared."""
    if isinstance(result, torch.Tensor):
        return result.float()
    for name in ("logits", "last_hidden_state"):
        if (found := getattr(result, name, None)) is not None:
            return tensor(found)
    return tensor(result[0])


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed_us(call: Callable[[], Any], calls: int, device: str) -> float:
    settle(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    settle(device)
    return (time.perf_counter() - start) / calls * 1e6


def contest(calls: Mapping[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Medians of interleaved rounds, which begin with another one each time."""
    counts = {name: max(2, int(SAMPLE_US / timed_us(call, 2, device))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for at in range(ROUNDS):
        turn = at % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(timed_us(calls[name], counts[name], device))
    return {name: statistics.median(values) for name, values in samples.items()}


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def compiler(name: str) -> Callable[..., Any]:
    """A back end that is not equal to any other, so that what Dynamo compiled by one does not serve another."""
    found = torch._dynamo.backends.registry.lookup_backend(name)
    return lambda module, inputs, **options: found(module, inputs, **options)


def print_kernels(way: str, call: Callable[[], Any], calls: int = 3) -> None:
    """The kernels of a GPU that take longest, with microseconds and launches a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    kernels = sorted((one for one in taken.key_averages() if one.device_time_total > 0),
                     key=lambda one: -one.device_time_total)
    total, launches = (sum(getattr(one, of) for one in kernels) / calls for of in ("device_time_total", "count"))
    print(f"  {way}: {total:.0f} us of kernels, {launches:.0f} launches")
    for one in kernels[:16]:
        print(f"    {one.device_time_total / calls:8.1f} us {one.count / calls:6.1f} x {one.key[:100]}", flush=True)


def compare(name: str, models: Models, tune: bool, profile: bool) -> None:
    device = models.device
    model, args, kwargs = getattr(models, name)()
    torch._dynamo.reset()
    ways = ["untuned", *["tuned"] * tune, "inductor"]
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(*args, **kwargs)}
    expected, first_s, errors = tensor(calls["eager"]()), {}, {}
    for way in ways:
        if way == "tuned":
            start = time.perf_counter()
            result = fuseplan.planner.tune(model, args or kwargs, device=device)
            print(f"  {name} was tuned in {time.perf_counter() - start:.0f} s\n  {result}", flush=True)
        backend = compiler("inductor" if way == "inductor" else "fuseplan")
        compiled = torch.compile(model, dynamic=False, backend=backend)
        start = time.perf_counter()
        result = tensor(compiled(*args, **kwargs))
        settle(device)
        first_s[way] = time.perf_counter() - start
        errors[way] = float((result - expected).norm() / expected.norm())
        calls[way] = lambda compiled=compiled: compiled(*args, **kwargs)  # type: ignore[misc]
        calls[way]()
    torch._inductor.async_compile.shutdown_compile_workers()  # they import PyTorch for seconds, and disturb all sides
    runs = {"launched": contest(calls, device)}
    if device == "cuda":
        runs["graph"] = contest({way: captured(call) for way, call in calls.items()}, device)
    for kind, times in runs.items():
        best = min(times["eager"], times["inductor"])
        gains = [f"{way} {best / us:.2f}x" for way, us in times.items() if way not in ("eager", "inductor")]
        cells = [f"{us:.0f}" for us in times.values()]
        print(f"| {name} | {kind} | {' | '.join(cells)} | {', '.join(gains)} |", flush=True)
    if profile and device == "cuda":
        for way, call in calls.items():
            print_kernels(way, call)
    print(f"  first calls {({way: round(s, 1) for way, s in first_s.items()})} s, errors "
          f"{({way: f'{error:.1e}' for way, error in errors.items()})}", flush=True)
    print(f"  {fuseplan.planner.stats()}".replace("\n", "\n  "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAMES", help=", ".join(NAMES))
    parser.add_argument("--tune", action="store_true", help="tune each model on the spot, too")
    parser.add_argument("--small", action="store_true", help="few layers, small sizes")
    parser.add_argument("--profile", action="store_true", help="list the kernels that take longest, on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.basicConfig(format="  %(message)s")
    logging.getLogger(tune_module.__name__).setLevel(logging.INFO)  # where the time went
    print("| model | | eager | untuned |" + (" tuned |" if args.tune else "") + " inductor | of the better of both |")
    with torch.no_grad():
        for name in args.names or NAMES:
            compare(name, Models(args.device, args.small), args.tune, args.profile)


if __name__ == "__main__":
    main()
