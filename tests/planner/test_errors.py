import inspect
import pickle
from pathlib import Path

import pytest

from fuseplan.planner import errors
from fuseplan.planner.cli.main import describe
from fuseplan.search.errors import ForeignDatabaseError
from fuseplan.search.store.database import Database


def family() -> list[type[Exception]]:
    return [
        cls for _, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__ and cls not in (errors.NotLowerable, errors.RefusedError)
    ]


def test_a_refused_kernel_is_no_mistake_of_the_user() -> None:
    """It costs a group its kernel, and never reaches the command line."""
    for cls in (errors.NotLowerable, errors.RefusedError):
        assert not issubclass(cls, errors.FuseplanError)
        assert errors.failure_reason(cls("op: too small\nand more")) == "op: too small"


def test_every_error_is_a_user_error_with_exit_code_two() -> None:
    assert len(family()) >= 10
    for cls in family():
        assert issubclass(cls, errors.FuseplanError)
        assert cls.exit_code == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.UnknownModelError("lama", ["llama", "llama-3.2-1b", "gpt2"]), "did you mean llama"),
        (errors.UnknownPatternError("swigl", ["swiglu", "geglu"]), "did you mean swiglu"),
        (errors.UnknownOpError("aten.ad.Tensor", ["aten.add.Tensor"]), "did you mean aten.add.Tensor"),
    ],
)
def test_unknown_names_suggest_the_nearest(error: errors.FuseplanError, expected: str) -> None:
    assert expected in str(error)
    assert "\n" not in str(error)


def test_an_argument_is_spelled_by_whoever_shows_the_error() -> None:
    """And nothing else of a message is touched: a user's path may look like an option, or have braces."""
    error = errors.ConfigError("{} {}: no such {}", errors.Argument("kv_len"), "models--org--{name}", "file")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one) == "kv_len models--org--{name}: no such file"
        assert describe(one) == ("--kv-len models--org--{name}: no such file", 2)
    assert describe(errors.ConfigError("{} is a path")) == ("{} is a path", 2)


def test_errors_of_the_store_are_spelled_too(tmp_path: Path) -> None:
    (tmp_path / "{weights}.db").write_text("no database")
    with pytest.raises(ForeignDatabaseError) as raised:
        Database(tmp_path / "{weights}.db")
    line, status = describe(raised.value)
    assert status == 2 and "{weights}.db" in line and line.endswith("with --db")
    with pytest.raises(errors.FuseplanError, match=r"with db$"), errors.one_family():
        raise raised.value


@pytest.mark.parametrize("error", [errors.UnknownModelError("lama", ["llama"]), errors.UnknownOpError("{}", ["x"])])
def test_an_unknown_name_comes_back_from_a_worker(error: errors.FuseplanError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_an_unknown_model_names_the_options_for_files_and_modules() -> None:
    line, _ = describe(errors.UnknownModelError("zzz", ["llama"]))
    assert "--config" in line and "--module" in line


def test_unknown_name_far_from_everything_lists_what_exists() -> None:
    message = str(errors.UnknownModelError("zzz", ["llama", "gpt2"]))
    assert "'zzz'" in message
    assert "known: gpt2, llama" in message
    assert "config.json" in message


def test_nearest_is_empty_when_nothing_is_close() -> None:
    assert errors.nearest("qqqq", ["llama", "swiglu"]) == []
    assert errors.nearest("swiglu", ["swiglu", "swiglu", "geglu"])[0] == "swiglu"


def test_a_missing_compiler_is_named_in_words() -> None:
    assert str(errors.CompilerMissingError("cpp: no icpx")).endswith("nothing to tune (cpp: no icpx)")
