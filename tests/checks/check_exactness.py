"""Whether compiled decoder layers are as exact as eager ones, and whether greedy tokens stay the same.

Layer by layer: each of some layers with weights of their own is given what eager made of the one before. What eager and
the compiled layer return, and what they write into static caches, is compared with the same layer in float64. A layer
is wrong where our relative error (of norms, over several inputs) is above ``--allowed`` times eager's. It is not 1:
which way each value is rounded is luck, and two roundings of one exact result differ in their errors, too. Much of
what comes out of a layer is what went in, rounded by both: small errors of attention add but few per cent.

Tokens: a Llama with random weights generates greedily in float32, from a static cache, by Hugging Face's
``generate()``. It is wrong where a token differs from eager's. In float32 rounding is far below the gaps between
logits: the smallest that eager saw between its two best is in the table, in standard deviations of the logits.

    python tests/checks/check_exactness.py --models llama qwen3 --cells 1x1 16x1 64x1 --out exactness.md
    python tests/checks/check_exactness.py --device cpu --models tiny --cells 1x1 4x1 2x16   # two minutes
    python tests/checks/check_exactness.py --models                                          # tokens alone
    python tests/checks/check_exactness.py --generate-batches                                # layers alone

Every region is tuned in the first call, ``--trials 4 --seconds 2`` briefly; ``--folder`` keeps the tuning database for
the next run. Exits with status 1 if anything is wrong, and where nothing of ours ran. pytest does not collect it;
``test_exactness.py`` asks it about contestants that are known to be right or wrong.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import generation
import torch
import transformers
from decoder_layers import MODELS, probe_once
from generation import forget
from layer_errors import Call, LayerRow, layer_rows, run_layer

import fuseplan.planner
from fuseplan.planner.dispatch_stats import Stats
from fuseplan.planner.models.sources import find_source, hf_config, quiet
from fuseplan.planner.peers.contestant import EAGER, OURS
from fuseplan.planner.runtime.dispatch import fuseplan as fuseplan_backend
from fuseplan.search.tune.tuner import Budget

#: Entries of a Llama's config for machines that are slow.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class TokensRow:
    """One call of ``generate()``."""

    label: str
    tokens: str = ""
    smallest_gap: float = math.nan
    distinct: int = 0
    problems: list[str] = field(default_factory=list)


# -- layer by layer ---------------------------------------------------------------------------------------


def compiled_layer(device: str, database: str) -> Call:
    options: dict[str, Any] = {"db": database, "on_miss": "tune"}
    if device == "cuda":
        options["regime"] = "graph"
    return torch.compile(run_layer, backend=fuseplan_backend, dynamic=False, options=options)


def check_cell(name: str, cell: tuple[int, int], arguments: argparse.Namespace, database: str) -> list[LayerRow]:
    """Every layer of one model at one size, judged."""
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"))
    forget(arguments.device)
    fuseplan.planner.reset_stats()
    ours, rows, began = compiled_layer(arguments.device, database), [], time.perf_counter()
    with torch.no_grad():
        for row in layer_rows(ours, name, cell, arguments.layers, arguments.inputs, arguments.device, dtype):
            row.judge(arguments.allowed)
            rows.append(row)
            print(f"{name} {row.cell} layer {row.layer}: after {time.perf_counter() - began:.1f} s", flush=True)
    stats = fuseplan.planner.stats()
    print(stats, flush=True)
    rows[0].problems += dispatch_problems(stats)
    return rows


def dispatch_problems(stats: Stats) -> list[str]:
    """Why what was compared is not what a plan says."""
    found = [f"{number} x {reason}" for reason, number in stats.fallbacks.items()]
    if not stats.groups_fused + stats.library_calls:
        found.append("nothing of ours ran")
    return found


# -- tokens -----------------------------------------------------------------------------------------------


def made_llama(sizes: str, layers: int, device: str) -> Any:
    """A Llama of float32 with random weights, as Hugging Face draws them."""
    from transformers import AutoModelForCausalLM

    config = hf_config(find_source(model="llama-3.1-8b", layers=layers))
    if sizes == "tiny":
        config = type(config).from_dict({**config.to_dict(), **TINY})
    torch.manual_seed(1)
    with quiet(), torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def check_tokens(module: Any, sizes: generation.Sizes, device: str, database: str) -> TokensRow:
    """Greedy tokens of one batch, ours beside eager's."""
    forget(device)
    fuseplan.planner.reset_stats()
    options, runs, tokens = {"db": database, "on_miss": "tune"}, {}, {}
    for name in (EAGER, OURS):
        runs[name] = generation.Generation(name, module, sizes, generation.how_compiled(name, device, options))
        began = time.perf_counter()
        tokens[name] = runs[name]()
        print(f"{sizes.label}, {name}: {time.perf_counter() - began:.1f} s", flush=True)
    stats = fuseplan.planner.stats()
    print(stats, flush=True)
    row = judged_tokens(sizes.label, tokens[OURS], tokens[EAGER], gaps(module, runs[EAGER].ids, tokens[EAGER]))
    row.problems += dispatch_problems(stats)
    if device == "cuda" and not stats.recordings:
        row.problems.append("no CUDA graph was recorded")
    return row


def gaps(module: Any, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Between eager's two best logits at each token, [batch, new], in standard deviations of the logits."""
    new = tokens.shape[1]
    with torch.no_grad():
        ids = torch.cat((prompt, tokens[:, :-1]), 1)
        logits = module(input_ids=ids, use_cache=False, logits_to_keep=new).logits
    best = logits.topk(2).values.double()
    found: torch.Tensor = (best[..., 0] - best[..., 1]) / logits.std(-1)
    return found


def judged_tokens(label: str, tokens: torch.Tensor, expected: torch.Tensor, gap: torch.Tensor) -> TokensRow:
    """The row of a call. Tokens and ``gap`` are [batch, new], as :func:`gaps` has it."""
    row = TokensRow(label, "the same", float(gap.min()), int(expected.unique().numel()))
    if (first := generation.first_difference(tokens, expected)) is not None:
        step = first - 1
        which = [at for at, one in enumerate((tokens != expected)[:, step].tolist()) if one]
        row.tokens = f"another from token {first} on"
        row.problems += [
            f"token {first} of sequence {at + 1} is {int(tokens[at, step])}, eager's {int(expected[at, step])}; "
            f"eager's two best are {float(gap[at, step]):.1e} standard deviations of the logits apart"
            for at in which
        ]
    return row


# -- tables -----------------------------------------------------------------------------------------------


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)


def layers_table(rows: Sequence[LayerRow]) -> str:
    parts = ("output", "keys", "values")
    heads = ["model", "batch x length", "layer"]
    heads += [head for part in parts for head in (f"{part}: eager's error", "ours", "ratio")]
    lines = []
    for row in rows:
        errors = [cell for part in parts for cell in (row.errors[part].cells() if part in row.errors else ["-"] * 3)]
        lines.append([row.model, row.cell, str(row.layer), *errors, verdict(row)])
    return table([*heads, "wrong"], lines)


def tokens_table(rows: Sequence[TokensRow]) -> str:
    heads = ["generate()", "tokens", "distinct", "smallest gap", "wrong"]
    lines = [[row.label, row.tokens, str(row.distinct), f"{row.smallest_gap:.1e}", verdict(row)] for row in rows]
    return table(heads, lines)


def verdict(row: LayerRow | TokensRow) -> str:
    return "; ".join(dict.fromkeys(row.problems)) or "-"


def summary(rows: Sequence[LayerRow], tokens: Sequence[TokensRow]) -> str:
    found = []
    if rows:
        ratios = [one.ratio for row in rows for one in row.errors.values()]
        wrong = sum(bool(row.problems) for row in rows)
        found.append(f"{len(rows)} layers, {wrong} wrong; the largest ratio is {max(ratios, default=math.nan):.3f}.")
    if tokens:
        found.append(f"{len(tokens)} calls of generate(), {sum(bool(row.problems) for row in tokens)} wrong.")
    return " ".join(found) + "\n"


def headline(arguments: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    return (
        f"{device}; torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}. Layers in {dtype}, {arguments.inputs} inputs each, {arguments.allowed} times "
        f"eager's error allowed. Matmuls of float32: {arguments.matmul_precision}.\n"
    )


# -- the command ------------------------------------------------------------------------------------------


@contextmanager
def brief_search(trials: int | None, seconds: float | None) -> Iterator[None]:
    """Another budget for what is tuned in a first call; the usual one where nothing is given."""
    usual = partial(Budget.on, trials=trials, seconds=seconds)
    with mock.patch.object(Budget, "on", staticmethod(usual)):
        yield


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llama", "qwen3", "gemma3"], choices=list(MODELS))
    parser.add_argument("--cells", nargs="+", default=["1x1", "4x1", "16x1", "64x1", "1x2048"], help="BATCHxLENGTH")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--inputs", type=int, default=4, help="of each layer: luck evens out over them")
    parser.add_argument("--allowed", type=float, default=1.1, help="our error over eager's")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="by default bfloat16 on GPUs")
    parser.add_argument("--generate-batches", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--generate-sizes", choices=["llama-3.1-8b", "tiny"], help="by default tiny on CPUs")
    parser.add_argument("--generate-layers", type=int, help="4 by default, 2 of tiny sizes")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--matmul-precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trials", type=int, help="configurations that a search tries; the usual number otherwise")
    parser.add_argument("--seconds", type=float, help="of one search; as many as usual otherwise")
    parser.add_argument("--folder", help="keeps the tuning database; a new one otherwise")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    torch.set_float32_matmul_precision(arguments.matmul_precision)
    rows: list[LayerRow] = []
    tokens: list[TokensRow] = []
    with tempfile.TemporaryDirectory() as scratch, brief_search(arguments.trials, arguments.seconds):
        database = f"{arguments.folder or scratch}/tuning.db"
        probe_once(arguments.device, database)
        for name in arguments.models:
            for cell in arguments.cells:
                batch, length = map(int, cell.split("x"))
                found = check_cell(name, (batch, length), arguments, database)
                rows += found
                print(layers_table(found), flush=True)
        if arguments.generate_batches:
            sizes = arguments.generate_sizes or ("llama-3.1-8b" if arguments.device == "cuda" else "tiny")
            layers = arguments.generate_layers or (2 if sizes == "tiny" else 4)
            module = made_llama(sizes, layers, arguments.device)
            for batch in arguments.generate_batches:
                asked = generation.Sizes(batch, arguments.prompt, arguments.new_tokens)
                tokens.append(check_tokens(module, asked, arguments.device, database))
                tokens[-1].label += f", {sizes} with {layers} layers"
                print(tokens_table(tokens[-1:]), flush=True)
    made = [layers_table(rows)] * bool(rows) + [tokens_table(tokens)] * bool(tokens)
    text = "\n".join([headline(arguments), *made, summary(rows, tokens)])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
    return int(any(row.problems for row in rows) or any(row.problems for row in tokens))


if __name__ == "__main__":
    sys.exit(main())
