"""Objects named by a text: what is found, and what each refusal says."""

import collections
import importlib
import sys
from pathlib import Path

import pytest

from rl_launcher.recipe_files import ImportStringError, load_object


def refused(text: str) -> str:
    with pytest.raises(ImportStringError) as caught:
        load_object(text, wanted="a reward function")
    message = str(caught.value)
    assert message.startswith(f"{text!r} does not name a reward function: ")
    return message


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_object_of_a_module_is_found() -> None:
    assert load_object("collections:OrderedDict", wanted="a class") is collections.OrderedDict
    assert load_object("collections.abc:Mapping.get", wanted="a function") is collections.abc.Mapping.get


def test_an_object_of_a_file_is_found_and_leaves_no_trace(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (here / "rewards.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass R:\n    a: int = 1\ndef score(): return R()\n"
    )
    before = list(sys.path)
    score = load_object("rewards.py:score", wanted="a reward function")
    again = load_object(f"{here}/rewards.py:R", wanted="a class")
    assert callable(score)
    assert type(score()) is again  # the file ran once
    assert sys.path == before
    assert "rewards" not in sys.modules
    assert [path.name for path in here.iterdir()] == ["rewards.py"]


def test_files_of_one_name_are_different_modules(here: Path) -> None:
    for name in ("a", "b"):
        (here / name).mkdir()
        (here / name / "rewards.py").write_text(f"where = {name!r}\n")
    assert [load_object(f"{name}/rewards.py:where", wanted="a name") for name in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize(
    "text", ["rewards.py", "module", ":name", "module:", "module:not a name", "a.b:c:", "rewards.py:1"]
)
def test_another_form_is_refused(text: str) -> None:
    message = refused(text)
    assert "it is not written place:name\nwrite package.module:name or path/to/file.py:name" in message


@pytest.mark.parametrize("text", [".relative:name", "my-module:name", "a..b:name"])
def test_a_module_has_a_modules_name(text: str) -> None:
    assert "is not a module's name" in refused(text)


def test_a_missing_file_names_the_file_like_it(here: Path) -> None:
    (here / "rewards.py").write_text("")
    assert "there is no file reward.py. Did you mean rewards.py?" in refused("reward.py:score")
    assert f"there is no file gone/x.py. Looked in {here}/gone." in refused("gone/x.py:score")


def test_a_missing_module_names_the_module_like_it(here: Path) -> None:
    assert "there is no module colections. Did you mean collections" in refused("colections:abc")
    assert "there is no module collections.abcd. Did you mean collections.abc?" in refused("collections.abcd:Mapping")
    assert "there is no module math.abc. math is a module, not a package." in refused("math.abc:Mapping")
    assert "there is no module zzyzx. Is it installed?" in refused("zzyzx.qqq:name")
    (here / "myrewards.py").write_text("")
    assert "for its file write ./myrewards.py" in refused("myrewards:score")


def test_a_missing_name_lists_the_nearest(here: Path) -> None:
    (here / "rewards.py").write_text("def score_math(): ...\ndef length(): ...\n_secret = 1\n")
    assert "rewards.py has no score_maths. Did you mean score_math?" in refused("rewards.py:score_maths")
    assert "rewards.py has no zzz. It has length, score_math." in refused("rewards.py:zzz")


@pytest.mark.parametrize(
    ("source", "raised", "line"),
    [
        ("x = 1\n\ndef fail():\n    return 1 / 0\nfail()\n", "ZeroDivisionError: division by zero", "4: return 1 / 0"),
        ("import zzyzx\n", "ModuleNotFoundError: No module named 'zzyzx'", "1: import zzyzx"),
        ("import json\njson.loads('{')\n", "JSONDecodeError: ", "2: json.loads('{')"),
        ("a = 1\nb = = 2\n", "SyntaxError: ", "2: b = = 2"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", "2: sys.exit(3)"),
    ],
)
def test_a_file_that_raises_is_shown_with_its_line(here: Path, source: str, raised: str, line: str) -> None:
    (here / "rewards.py").write_text(source)
    before = set(sys.modules)
    with pytest.raises(ImportStringError) as caught:
        load_object("rewards.py:score", wanted="a reward function")
    assert f"importing it raised {raised}" in str(caught.value)
    assert f"{here / 'rewards.py'}:{line}" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == raised.split(":", maxsplit=1)[0]
    assert set(sys.modules) == before


def test_a_module_that_raises_is_shown_with_its_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "raising_module.py").write_text("\nraise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(here)
    importlib.invalidate_caches()
    message = refused("raising_module:x")
    assert "importing it raised RuntimeError: no" in message
    assert f"{here / 'raising_module.py'}:2: raise RuntimeError('no')" in message


def test_a_neighbour_of_a_file_is_not_searched_and_the_message_says_so(here: Path) -> None:
    (here / "rewards.py").write_text("import recipe_neighbour\n")
    (here / "recipe_neighbour.py").write_text("")
    assert "recipe_neighbour.py lies beside it, but a file is imported alone" in refused("rewards.py:score")


def test_an_interrupt_is_not_swallowed(here: Path) -> None:
    (here / "rewards.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_object("rewards.py:score", wanted="a reward function")
