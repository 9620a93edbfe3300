"""Command lines that no user means: each must end with one line that says what to do, and exit status 2.

    python tests/checks/check_commands.py [--processes 50] [-k WORDS]

Runs every line of ``LINES``, that many of them, spread over the list, as processes of their own and the others in this
one. A line passes when its status is 2, its error is one line of at most 600 characters without a Python traceback or
the name of a Python class, and no file was made; lines that say what is being done do not count. Exits with status 1
when one fails. pytest runs a part of the list.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import report_samples

from fuseplan.planner.cli import main as cli

#: One a line, as a shell would split it. The folder that they run in has the files of :func:`make_folder`.
LINES = r"""
frobnicate
--frobnicate
tune extra
tune --frobnicate
tune --model
tune --model ''
tune --model ' '
tune --model lama
tune --model LLAMA-9000
tune --model llama --config llama.json
tune --model llama --module toys:gated
tune --config llama.json --module toys:gated
tune --model ../../etc/passwd
tune --model 模型
tune --config ''
tune --config .
tune --config missing.json
tune --config weights.bin
tune --config empty.json
tune --config deep.json
tune --config list.json
tune --config text.json
tune --config number.json
tune --config null.json
tune --config nan.json
tune --config cut.json
tune --config latin.json
tune --config no_type.json
tune --config type_list.json
tune --config type_null.json
tune --config type_empty.json
tune --config type_unknown.json
tune --config wrong_hidden_text.json
tune --config wrong_hidden_negative.json
tune --config wrong_hidden_zero.json
tune --config wrong_hidden_huge.json
tune --config wrong_hidden_float.json
tune --config wrong_hidden_list.json
tune --config wrong_hidden_null.json
tune --config wrong_hidden_bool.json
tune --config wrong_hidden_deep.json
tune --config wrong_layers_text.json
tune --config wrong_layers_negative.json
tune --config wrong_layers_zero.json
tune --config wrong_layers_billion.json
tune --config wrong_layers_huge.json
tune --config wrong_heads_zero.json
tune --config wrong_heads_odd.json
tune --config wrong_heads_negative.json
tune --config wrong_heads_text.json
tune --config wrong_vocab_huge.json
tune --config wrong_vocab_zero.json
tune --config wrong_vocab_negative.json
tune --config wrong_vocab_text.json
tune --config wrong_act_unknown.json
tune --config wrong_act_number.json
tune --config wrong_rope_text.json
tune --config wrong_rope_unknown.json
tune --config wrong_architectures_number.json
tune --config wrong_architectures_text.json
tune --config wrong_dtype_number.json
tune --config wrong_dtype_unknown.json
tune --config wrong_eps_text.json
tune --config wrong_types_short.json
tune --config wrong_encdec.json
tune --config folder
tune --config llama.json/config.json
tune --config /dev/null
tune --manifest ''
tune --manifest missing.toml
tune --manifest folder
tune --manifest llama.json
tune --manifest weights.bin
tune --manifest deep.json
tune --manifest llama.json --model llama
tune --manifest llama.json --misses
tune --config llama.json --layers 0
tune --config llama.json --layers -1
tune --config llama.json --layers 1000000000
tune --config llama.json --layers 3
tune --config llama.json --layers two
tune --config llama.json --layers 1.5
tune --config llama.json --layers ２
tune --config llama.json --layers 1_0
tune --config llama.json --layers ''
tune --model llama --layers 1000000000
tune --model llama --layers 99999999999999999999999
tune --module ''
tune --module :
tune --module toys
tune --module toys:
tune --module :gated
tune --module toys:missing
tune --module toys:gated:more
tune --module toys:number
tune --module toys:not_a_pair
tune --module toys:not_a_module
tune --module toys:needs_arguments
tune --module toys:raises
tune --module toys:raises_empty
tune --module toys:raises_lines
tune --module toys:raises_base
tune --module toys:exits
tune --module toys:exits_well
tune --module toys:exits_with_words
tune --module toys:forward_raises
tune --module toys:forward_raises_base
tune --module toys:forward_exits
tune --module toys:wrong_shapes
tune --module toys:no_inputs
tune --module toys:text_input
tune --module missing_package:factory
tune --module toys.missing:factory
tune --module .toys:gated
tune --module ..:gated
tune --module ./toys.py:gated
tune --module toys.py:gated
tune --module 'to ys:gated'
tune --module raises_on_import:factory
tune --module raises_base_on_import:factory
tune --module exits_on_import:factory
tune --module exits_well_on_import:factory
tune --module syntax_error:factory
tune --module bad_encoding:factory
tune --module null_bytes:factory
tune --module imports_missing:factory
tune --module toys:gated --layers 1
tune --module toys:gated --decode 1
tune --module toys:gated --prefill 8
tune --module toys:gated --kv-len 64
tune --module toys:gated --dtype int8
explain --module toys:raises_base
explain --module exits_well_on_import:factory
bench model --module toys:exits_well
bench model --module toys:forward_raises_base
tune --pattern ''
tune --pattern swiglu
tune --pattern swiglou --shape 3x8
tune --pattern SWIGLU --shape 3x8
tune --pattern swiglu --shape ''
tune --pattern swiglu --shape x
tune --pattern swiglu --shape 3x
tune --pattern swiglu --shape 3by8
tune --pattern swiglu --shape 3x-8
tune --pattern swiglu --shape 0x8
tune --pattern swiglu --shape 3x8x8x8
tune --pattern swiglu --shape 3
tune --pattern swiglu --shape 3x8.5
tune --pattern swiglu --shape ３x８
tune --pattern swiglu --shape 1e3x8
tune --pattern swiglu --shape 3x8_0
tune --pattern swiglu --shape 99999999999999999999x8
tune --pattern swiglu --shape 2147483647x2147483647
tune --pattern swiglu --shape 100000000x100000
tune --pattern swiglu --shape 3x99999999999999999999999999999999999999
tune --pattern rope --shape 1x2x3x7
tune --pattern swiglu --shape 3x8 --dtype int8
tune --pattern swiglu --shape 3x8 --dtype ''
tune --pattern swiglu --shape 3x8 --dtype BF16
tune --pattern swiglu --shape 3x8 --dtype float8_e4m3fn
tune --pattern swiglu --shape 3x8 --decode 1
tune --pattern swiglu --shape 3x8 --decode ''
tune --pattern swiglu --shape 3x8 --layers 1
tune --pattern swiglu --shape 3x8 --model llama
tune --pattern swiglu --shape 3x8 --model ''
tune --pattern swiglu --shape 3x8 --regime graph --device cpu
tune --pattern swiglu --shape 3x8 --regime warp
tune --pattern swiglu --shape 3x8 --study nosuchdialect://host/db
tune --pattern swiglu --shape 3x8 --study /nowhere/studies.log
tune --pattern swiglu --shape 3x8 --numerics fp64
tune --pattern swiglu --shape 3x8 --device tpu
tune --pattern swiglu --shape 3x8 --device ''
tune --pattern swiglu --shape 3x8 --trials 0
tune --pattern swiglu --shape 3x8 --trials -5
tune --pattern swiglu --shape 3x8 --job-limit 0
tune --pattern swiglu --shape 3x8 --job-limit -1
tune --pattern swiglu --shape 3x8 --job-limit soon
tune --pattern swiglu --shape 3x8 --inductor fastest
tune --pattern swiglu --shape 3x8 --workers tls://127.0.0.1:1 --tls-ca missing.pem
tune --pattern swiglu --shape 3x8 --workers tls://127.0.0.1:1 --tls-cert missing.pem
tune --pattern swiglu --shape 3x8 --workers tls://127.0.0.1:1 --tls-key missing.pem
tune --pattern swiglu --shape 3x8 --trials 1.5
tune --pattern swiglu --shape 3x8 --trials many
tune --pattern swiglu --shape 3x8 --trials １
tune --pattern swiglu --shape 3x8 --seconds 0
tune --pattern swiglu --shape 3x8 --seconds nan
tune --pattern swiglu --shape 3x8 --seconds inf
tune --pattern swiglu --shape 3x8 --seconds -1
tune --pattern swiglu --shape 3x8 --seconds 1,5
tune --pattern swiglu --shape 3x8 --seconds １
tune --pattern swiglu --shape 3x8 --seed x
tune --pattern swiglu --shape 3x8 --seed -1
tune --pattern swiglu --shape 3x8 --seed 1e3
tune --pattern swiglu --shape 3x8 --seed 99999999999999999999
tune --shape 3x8
tune --shape ''
tune --decode 0
tune --decode -1
tune --decode x
tune --decode 1,,x
tune --decode 1.5
tune --decode ８
tune --decode 1_0
tune --decode ''
tune --decode , --prefill ,
tune --decode 99999999999999999999
tune --decode 9223372036854775807
tune --decode 2147483648
tune --decode 1 --kv-len 0
tune --decode 1 --kv-len 1
tune --decode 1 --kv-len -4
tune --decode 1 --kv-len x
tune --decode 1 --kv-len ６４
tune --decode 1 --kv-len 99999999999999999999
tune --decode 100000 --kv-len 2000000000
tune --prefill 0
tune --prefill 0x4
tune --prefill 4x0
tune --prefill 4x
tune --prefill x4
tune --prefill 4x4x4
tune --prefill -4x4
tune --prefill ４x４
tune --prefill 99999999999999999999
tune --prefill 100000x100000
tune --config bert.json --decode 1
tune --dtype int3
tune --dtype ''
tune --db nosuchdialect://host/db --pattern swiglu --shape 3x8
tune --db sqlite+nosuchdriver:///x.db --pattern swiglu --shape 3x8
tune --db postgresql://host:notaport/db --pattern swiglu --shape 3x8
tune --db postgresql://host:99999999/db --pattern swiglu --shape 3x8
tune --db postgresql://user:secret@127.0.0.1:1/db --pattern swiglu --shape 3x8
tune --db http://host/db --pattern swiglu --shape 3x8
tune --db '' --pattern swiglu --shape 3x8
tune --db . --pattern swiglu --shape 3x8
tune --db missing/../sound.db/x.db --pattern swiglu --shape 3x8
tune --db /proc/nowhere/tuning.db --pattern swiglu --shape 3x8
tune --db /dev/null --pattern swiglu --shape 3x8
tune --db weights.bin --pattern swiglu --shape 3x8
tune --db llama.json --pattern swiglu --shape 3x8
tune --format pdf
tune --format html --pattern swiglu --shape 3x8
tune --out . --pattern swiglu --shape 3x8
tune --out '' --pattern swiglu --shape 3x8
tune --out /proc/nowhere/tune.json --format json --pattern swiglu --shape 3x8
explain extra
explain --source
explain --source '' --pattern swiglu --shape 3x8
explain --source ' ' --pattern swiglu --shape 3x8
explain --source nosuchgroup --pattern swiglu --shape 3x8
explain --prelude --pattern swiglu --shape 3x8
explain --format html --pattern swiglu --shape 3x8
explain --out folder --pattern swiglu --shape 3x8
explain --pattern swiglu
explain --pattern swiglu --shape 3x8 --workload 5x8
explain --pattern swiglu --shape 3x99999999999999999999
explain --config wrong_hidden_text.json
explain --model ''
explain --layers 0
explain --db nosuchdialect://host/db --pattern swiglu --shape 3x8
bench frobnicate
bench model --model ''
bench model --pattern swiglu
bench patterns --pattern ''
bench patterns --pattern swiglou
bench patterns --shape 3x8
patterns --format yaml
patterns --format html
patterns --out .
patterns --out ''
probe --format pdf
probe --out /proc/nowhere/p.csv
backends --out /proc/nowhere/b.csv
env extra
env --device tpu
env --format yaml
env --out .
completion
completion tcsh
completion bash extra
completion --quiet bash
bench patterns --pattern swiglu --shape 3by8
bench patterns --pattern swiglu --shape 3x99999999999999999999
bench patterns --pattern swiglu --rows 0
bench patterns --pattern swiglu --rows x
bench patterns --pattern swiglu --rows ３
bench patterns --pattern swiglu --rows ''
bench patterns --pattern swiglu --cols -1
bench patterns --pattern swiglu --cols 99999999999999999999
bench patterns --pattern swiglu --shape 3x8 --rows 4
bench patterns --pattern swiglu --peers nobody
bench patterns --pattern swiglu --peers ''
bench patterns --pattern swiglu --modes warp
bench patterns --pattern swiglu --modes ''
bench patterns --pattern swiglu --modes graph --device cpu
bench patterns --pattern swiglu --trials 0
bench patterns --pattern swiglu --seconds nan
bench patterns --pattern swiglu --dtype int8
bench patterns --model llama
bench launch
bench generate
bench groups --model llama
bench patterns --pattern swiglu --shape 0x8
bench patterns --layers 1
bench model --rows 4
bench model --decode 0
bench model --seconds 0
bench model --layers 0
bench model --format html
report frobnicate
report --format pdf
report --regime warp
report --device tpu
report --model gpt9 --db sound.db
report --model '' --db sound.db
report --device-key nosuch --db sound.db
report --device-key '' --db sound.db
report --db nosuchdialect://host/db
report --db postgresql://host:notaport/db
report --db weights.bin
report --format html --out /proc/nowhere/r.html --db sound.db
report --format html --out . --db sound.db
report --format csv --out /dev/null/r.csv --db sound.db
report steps --out . --db sound.db
report accuracy --format json --out '' --db sound.db
report --quiet=yes --db sound.db
probe extra
probe --device tpu
probe --db /proc/nowhere/tuning.db
probe --plot /proc/nowhere/p.png
probe --plot p.exe
probe --plot .
patterns extra
patterns --shape 3x8
backends --device cpu
db frobnicate
db ls extra
db ls --format html
db ls --out .
db verify --format pdf
db export out.jsonl --format csv
db ls --db nosuchdialect://host/db
db ls --db sqlite+nosuchdriver:///x.db
db ls --db postgresql://host:notaport/db
db ls --db postgresql://user:secret@127.0.0.1:1/db
db ls --db ''
db ls --db weights.bin
db ls --db llama.json
db ls --db .
db show
db show nosuch --db sound.db
db show '' --db sound.db
db show x --db nosuchdialect://host/db
db export --db sound.db
db export /proc/nowhere/r.jsonl --db sound.db
db export . --db sound.db
db export out.jsonl --db nosuchdialect://host/db
db export out.jsonl --db weights.bin
db export out.jsonl --device-key nosuch --db sound.db
db import
db import missing.jsonl
db import . --db copy.db
db import weights.bin --db copy.db
db import llama.json --db copy.db
db import deep.json --db copy.db
db import empty.json --db copy.db
db import null.json --db copy.db
db import /dev/null --db copy.db
db verify --db nosuchdialect://host/db
db verify --db weights.bin
db verify --out . --db sound.db
db prune --db nosuchdialect://host/db
db prune --db weights.bin
db prune --device-key
db misses extra
db misses --device tpu
db misses --device-key
db misses --format pdf
db misses --out .
db misses --db weights.bin
db misses --db nosuchdialect://host/db
fleet frobnicate
fleet worker
fleet worker extra more
fleet worker ''
fleet worker nonsense
fleet worker tcp://host:notaport
fleet worker tcp://127.0.0.1:1
fleet worker http://127.0.0.1:1
fleet worker local
fleet worker tcp://127.0.0.1:1 --device tpu
fleet worker tcp://127.0.0.1:1 --host nosuch.invalid
fleet worker tcp://127.0.0.1:1 --interface nosuch0
fleet worker tls://127.0.0.1:1 --tls-ca missing.pem
fleet worker tls://127.0.0.1:1 --tls-cert missing.pem
fleet worker tls://127.0.0.1:1 --tls-key missing.pem
fleet status tls://127.0.0.1:1 --tls-ca missing.pem
fleet status tls://127.0.0.1:1 --tls-cert missing.pem
fleet status tls://127.0.0.1:1 --tls-key missing.pem
fleet status tcp://127.0.0.1:1
fleet status nonsense
fleet status ''
fleet status --model lama
fleet status --config missing.json
fleet status --config wrong_hidden_text.json
fleet status --module toys:missing
fleet status --manifest missing.toml
fleet status --manifest llama.json
fleet status --manifest llama.json --model llama
fleet status --pattern swiglou --shape 3x8
fleet status --pattern swiglu --shape 3by8
fleet status --shape 3x8
fleet status --pattern swiglu --shape 3x8 --layers 1
fleet status --decode 0
fleet status --kv-len 0
fleet status --prefill 0x4
fleet status --dtype int3
fleet status --layers 0
fleet status --numerics fp64
fleet status --regime warp
fleet status --device tpu
fleet status --db weights.bin
fleet status --format pdf
fleet status --out .
tune --workers ''
tune --workers nonsense
tune --workers tcp://host:notaport
tune --workers tcp://127.0.0.1:1
tune --workers tcp://127.0.0.1:1 --pattern swiglu --shape 3x8
tune --workers http://127.0.0.1:1
tune --workers local --misses
tune --workers local --device tpu
tune --most 0
tune --misses --most many
tune --misses --most -1
explain --decode 0
explain --kv-len 0
explain --prefill 0x4
explain --dtype int3
explain --numerics fp64
explain --regime warp
explain --device tpu
bench model --config missing.json
bench model --kv-len 0
bench model --prefill 0x4
bench patterns --pattern swiglu --shape 3x8 --numerics fp64
bench patterns --pattern swiglu --shape 3x8 --tune-seconds 0
bench model --regime warp
bench model --db weights.bin
bench patterns --pattern swiglu --shape 3x8 --out /proc/nowhere
report --against
backends --format yaml
""".strip().splitlines()


#: A small Llama, whose entries the wrong configs replace.
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128, "hidden_act": "silu",
}
WRONG: dict[str, object] = {
    "hidden_text": {"hidden_size": "wide"}, "hidden_negative": {"hidden_size": -64}, "hidden_zero": {"hidden_size": 0},
    "hidden_huge": {"hidden_size": 10**30}, "hidden_float": {"hidden_size": 64.5}, "hidden_list": {"hidden_size": [64]},
    "hidden_null": {"hidden_size": None}, "hidden_bool": {"hidden_size": True},
    "hidden_deep": {"hidden_size": {"a": {"b": [[[]]]}}}, "layers_text": {"num_hidden_layers": "two"},
    "layers_negative": {"num_hidden_layers": -2}, "layers_zero": {"num_hidden_layers": 0},
    "layers_billion": {"num_hidden_layers": 10**9}, "layers_huge": {"num_hidden_layers": 10**30},
    "heads_zero": {"num_attention_heads": 0}, "heads_odd": {"num_attention_heads": 3},
    "heads_negative": {"num_key_value_heads": -1}, "heads_text": {"num_attention_heads": "four"},
    "vocab_huge": {"vocab_size": 10**19}, "vocab_zero": {"vocab_size": 0}, "vocab_negative": {"vocab_size": -1},
    "vocab_text": {"vocab_size": "all"}, "act_unknown": {"hidden_act": "sparkle"}, "act_number": {"hidden_act": 7},
    "rope_text": {"rope_scaling": "yes"}, "rope_unknown": {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
    "architectures_number": {"architectures": 5}, "architectures_text": {"architectures": [5]},
    "dtype_number": {"dtype": 5}, "dtype_unknown": {"dtype": "float7"}, "eps_text": {"rms_norm_eps": "small"},
    "types_short": {"layer_types": ["full_attention"]}, "encdec": {"is_encoder_decoder": True},
}
FILES = {
    "empty.json": "", "deep.json": "[" * 200_000, "list.json": "[1, 2]", "text.json": '"llama"', "number.json": "7",
    "null.json": "null", "nan.json": "NaN", "cut.json": '{"model_type": "lla', "no_type.json": "{}",
    "type_list.json": '{"model_type": ["llama"]}', "type_null.json": '{"model_type": null}',
    "type_empty.json": '{"model_type": ""}', "type_unknown.json": '{"model_type": "lama"}',
    "bert.json": '{"model_type": "bert", "num_hidden_layers": 1}',
    "raises_on_import.py": "raise KeyError('no\\nkey')\n",
    "raises_base_on_import.py": "class Halt(BaseException): pass\nraise Halt('stop')\n",
    "exits_on_import.py": "import sys; sys.exit(5)\n", "exits_well_on_import.py": "import sys; sys.exit(0)\n",
    "syntax_error.py": "def factory(:\n", "imports_missing.py": "import nothing_of_that_name\n",
    "toys.py": """
import sys
import torch
from torch import nn

class Halt(BaseException):
    pass

class Says(nn.Module):
    def __init__(self, error=None):
        super().__init__()
        self.error, self.layer = error, nn.Linear(8, 8)
    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.layer(x)

def gated(): return Says(), torch.ones(3, 8)
number = 7
def not_a_pair(): return Says()
def not_a_module(): return 7, torch.ones(3, 8)
def needs_arguments(width): return Says(), torch.ones(3, width)
def raises(): raise ValueError("no weights here")
def raises_empty(): raise ValueError
def raises_lines(): raise RuntimeError("first\\nsecond\\nthird")
def raises_base(): raise Halt("no further")
def exits(): sys.exit(5)
def exits_well(): sys.exit(0)
def exits_with_words(): sys.exit("good bye")
def forward_raises(): return Says(ValueError("no forward")), torch.ones(3, 8)
def forward_raises_base(): return Says(Halt("no further")), torch.ones(3, 8)
def forward_exits(): return Says(SystemExit(0)), torch.ones(3, 8)
def wrong_shapes(): return Says(), torch.ones(3, 9)
def no_inputs(): return Says(), ()
def text_input(): return Says(), "words"
""",
}
#: Parts of lines that are right.
CONTEXTS = (" --pattern swiglu --shape 3x8", " --db sound.db", " --db copy.db")
#: What errors call an option where not by its name: a URL may hold a password, and is not repeated.
ABOUT = {"--db": "database", "--device-key": "device", "--config": "config"}
#: Commands without a line, and the reason.
NOT_TRIED = {(): "only help", ("db", "pull"): "asks a server, of which the tests of servers have wrong addresses"}
#: Options of which no value is a mistake: `plan env` says what is wrong with a database, for reports of bugs.
ANY_VALUE = ("env --db",)
#: Names of Python's and the libraries' classes do not help who made the mistake.
_CLASS = re.compile(r"\b[A-Z][A-Za-z]*(Error|Exception|Exit|Interrupt|Warning)\b|\bHalt\b")
_LONGEST = 600
#: What a log is told while something takes long.
PROGRESS = re.compile(r"plan: \[\d+ s\] ")
#: Seconds after which a line is taken for one that never ends.
_LIMIT_S = 60


def make_folder(folder: Path) -> None:
    """What the lines name: configs, modules, a database, and files that are none."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, entries in {"llama": {}, **{f"wrong_{name}": entry for name, entry in WRONG.items()}}.items():
        (folder / f"{name}.json").write_text(json.dumps({**LLAMA, **entries}))
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 20)
    (folder / "latin.json").write_bytes('{"model_type": "lämä"}'.encode("latin-1"))
    (folder / "bad_encoding.py").write_bytes(b"factory = '\xff\xfe'\n")
    (folder / "null_bytes.py").write_bytes(b"factory = 1\0\n")
    (folder / "folder").mkdir()
    report_samples.sample_database(folder / "sound.db").close()


@dataclass(frozen=True)
class Ended:
    """How a command line ended: its status, what it wrote, and whether it made or changed a file."""

    status: int
    out: str
    err: str
    changed: tuple[str, ...] = ()

    def faults(self, line: str) -> list[str]:
        """What a user would hold against it, who gave this command line."""
        found = [] if self.status == 2 else [f"status {self.status}"]
        if names := culprits(line):
            found += [] if any(name in self.err for name in names) else [f"none of {names} is named"]
        lines = [line for line in self.err.splitlines() if not PROGRESS.match(line)]
        if len(lines) != 1 or not lines[0].startswith("plan: error: "):
            found.append(f"{len(lines)} lines of errors")
        if "Traceback" in self.err or _CLASS.search(self.err):
            found.append("words of Python's")
        if len(self.err) > _LONGEST:
            found.append(f"{len(self.err)} characters")
        if self.out:
            found.append("output")
        if "secret" in self.err + self.out:
            found.append("a password")
        return [*found, *(f"wrote {name}" for name in self.changed)]


def culprits(line: str) -> list[str]:
    """The words of a command line one of which its error has to repeat, and what they are about.

    Those are its options, what was given for them, files, and what a wrong config is wrong in; and no words that only
    give a command something to do.
    """
    for context in CONTEXTS:
        line = re.sub(f"{context}(?= |$)", "", line)
    names = command_names()
    words = [one for word in shlex.split(line) for one in word.split("=") if one not in names]
    options = [word for word in words if word.startswith("--")]
    words += [ABOUT.get(word, word.removeprefix("--").removeprefix("no-").replace("-", " ")) for word in options]
    words += [Path(word).name for word in words]
    wrong = [WRONG[name] for word in words if (name := word.removeprefix("wrong_").removesuffix(".json")) in WRONG]
    words += [str(entry) for one in wrong if isinstance(one, dict) for entry in one]
    return list(dict.fromkeys(word for word in words if len(word.strip(" ./")) > 1))


@functools.cache
def commands() -> Mapping[tuple[str, ...], tuple[str, ...]]:
    """The options of every command that take a value, as its help lists them; flags have nothing to be wrong about."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}

    def visit(command: Any, path: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            visit(inner, (*path, name))
        if not hasattr(command, "commands") or command.invoke_without_command:
            valued = [one for one in command.params if not getattr(one, "is_flag", False)]
            found[path] = tuple(one.opts[-1] for one in valued if one.opts[-1].startswith("--"))

    visit(typer.main.get_command(cli.app), ())
    return found


def command_names() -> set[str]:
    return {name for path in commands() for name in path}


def untried() -> list[str]:
    """Commands, and options that take a value, without a line."""
    found = []
    for path, options in commands().items():
        lines = [words for words in map(shlex.split, LINES) if tuple(words[: len(path)]) == path]
        words = {word.partition("=")[0] for line in lines for word in line}
        found += [] if lines or path in NOT_TRIED else [" ".join(path)]
        found += [f"{' '.join(path)} {option}" for option in options if option not in words and path not in NOT_TRIED]
    return [one for one in found if one not in ANY_VALUE]


class Scene:
    """A folder to run bad lines in, with data and cache folders of its own; a context manager.

    Args:
        folder: An empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "home" / "data"
        self._here = Path.cwd()
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        names = {"XDG_DATA_HOME": self._data, "XDG_CACHE_HOME": folder / "home" / "cache", "PYTHONPATH": path}
        self._names = {name: str(value) for name, value in names.items()}
        self._before = {name: os.environ.get(name) for name in self._names}

    def __enter__(self) -> Scene:
        make_folder(self.folder)
        os.environ.update(self._names)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        return self

    def __exit__(self, *exc: object) -> None:
        sys.path.remove(str(self.folder))
        os.chdir(self._here)
        for name, value in self._before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def here(self, line: str) -> Ended:
        """Run a line in this process."""
        out, err, before = io.StringIO(), io.StringIO(), self._files()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.run(shlex.split(line))
        return Ended(status, out.getvalue(), err.getvalue(), self._changes(before))

    def alone(self, line: str) -> Ended:
        """Run a line as a user does."""
        before = self._files()
        command = [sys.executable, "-c", "from fuseplan.planner.cli.main import main; main()", *shlex.split(line)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        return Ended(done.returncode, done.stdout, done.stderr, self._changes(before))

    def _files(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file that a mistake must leave alone: all but what a cache keeps."""
        ours = {"__pycache__", "cache"}
        files = [path for path in self.folder.rglob("*") if not ours & set(path.parts) and path.is_file()]
        # SQLite shares memory with other processes through two files beside a database, when reading too.
        stats = [(path, path.stat()) for path in files if not path.name.endswith(("-shm", "-wal"))]
        return {str(path.relative_to(self.folder)): (stat.st_size, stat.st_mtime_ns) for path, stat in stats}

    def _changes(self, before: dict[str, tuple[int, int]]) -> tuple[str, ...]:
        after = self._files()
        return tuple(name for name in sorted({*before, *after}) if before.get(name) != after.get(name))


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"it did not end within {_LIMIT_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=50, help="lines that run as processes of their own")
    parser.add_argument("-k", default="", dest="words", help="only lines that contain this")
    args = parser.parse_args()
    lines = [line for line in LINES if args.words in line]
    every = max(1, len(lines) // args.processes) if args.processes else len(lines) + 1
    failed, slowest = 0, (0.0, "")
    signal.signal(signal.SIGALRM, _give_up)
    with tempfile.TemporaryDirectory() as folder, Scene(Path(folder)) as scene:
        for number, line in enumerate(lines, 1):
            start = time.monotonic()
            signal.alarm(_LIMIT_S)
            ended = scene.here(line) if number % every else scene.alone(line)
            slowest = max(slowest, (time.monotonic() - start, line))
            if faults := ended.faults(line):
                failed += 1
                print(f"plan {line}\n    {', '.join(faults)}\n    {ended.err.strip()[:1500]}", flush=True)
    signal.alarm(0)
    for words in untried():
        failed += 1
        print(f"no line has plan {words}")
    print(f"{len(lines)} bad command lines, {failed} not answered by one line and status 2; "
          f"the slowest took {slowest[0]:.1f} s: plan {slowest[1]}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
