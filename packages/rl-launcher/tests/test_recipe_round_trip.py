"""What a recipe resolves to can be written and read again, whatever it holds; merging has its laws."""

import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_launcher.recipe_files import load_recipe
from rl_launcher.recipe_files.load import Resolved, escape
from rl_launcher.recipe_files.nodes import merge, node_of
from rl_launcher.recipe_files.yaml_source import RecipeDumper, dump

CONFIG: dict[str, object] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    number: float = 0.5
    texts: tuple[str, ...] = ("a",)
    maybe: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    __pydantic_config__: ClassVar[dict[str, object]] = CONFIG

    count: int = 0
    text: str = ""
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    path: Path = Path()
    leaf: Leaf = field(default_factory=lambda: Leaf(number=7.0))
    off: Leaf | None = None
    words: dict[str, float | str | None] = field(default_factory=dict)
    last: Leaf = field(default_factory=Leaf)


TRAPS = [
    "on",
    "1e-3",
    "010",
    "~",
    "",
    "null",
    "<<",
    "=",
    "${env:A}",
    "$${",
    "2026-01-01",
    "a: b",
    "- x",
    "#",
    "1_0",
    "\n",
    "\x85",
]
texts = st.one_of(st.sampled_from(TRAPS), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
floats = st.floats(allow_nan=False)
leaves = st.builds(Leaf, number=floats, texts=st.lists(texts, max_size=3).map(tuple), maybe=st.none() | st.integers())
trees = st.builds(
    Tree,
    count=st.integers(),
    text=texts,
    flag=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    path=st.sampled_from([Path("a/b"), Path("/c d")]),
    leaf=leaves,
    off=st.none() | leaves,
    words=st.dictionaries(texts, st.none() | texts | floats, max_size=3),
    last=leaves,
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), plain | st.dictionaries(texts, plain, max_size=2), max_size=3
)


def load(text: str, *overrides: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.yaml"
        path.write_text(text, encoding="utf-8", newline="")
        return load_recipe(path, schema=Tree, overrides=overrides)


def written(tree: Tree) -> str:
    """Return a recipe that sets every key by hand."""
    return Resolved(value=tree, origins={}).to_yaml()


def flow(data: object) -> str:
    """Return a value as one writes it in an override."""
    text = yaml.dump(escape(data), Dumper=RecipeDumper, default_flow_style=True, allow_unicode=True, width=sys.maxsize)
    return str(text).removesuffix("\n").removesuffix("\n...")


@settings(max_examples=40, deadline=None)
@given(trees)
def test_a_resolved_recipe_loads_as_the_same_value(tree: Tree) -> None:
    resolved = load(written(tree))
    assert resolved.value == tree
    assert load(resolved.to_yaml()).value == tree
    assert not any(origin.is_default for origin in resolved.origins.values())


@settings(max_examples=40, deadline=None)
@given(trees, st.integers(), floats, st.lists(texts, max_size=2))
def test_an_override_changes_its_key_and_nothing_else(tree: Tree, count: int, number: float, words: list[str]) -> None:
    resolved = load(written(tree), f"count={count}", f"leaf.number={flow(number)}", f"off.texts={flow(words)}")
    leaf = replace(tree.leaf, number=number)
    off = replace(tree.off or Leaf(), texts=tuple(words))
    assert resolved.value.count == count
    assert resolved.value.leaf == leaf
    assert resolved.value.off == off
    assert (resolved.value.text, resolved.value.words, resolved.value.last) == (tree.text, tree.words, tree.last)


@settings(max_examples=40, deadline=None)
@given(plain)
def test_what_is_written_means_the_same_to_a_yaml_1_1_reader(data: Any) -> None:
    assert yaml.safe_load(dump(data)) == data


@settings(max_examples=40, deadline=None)
@given(mappings, mappings, mappings)
def test_merging_has_a_neutral_element_is_idempotent_and_is_what_one_would_write(a: Any, b: Any, c: Any) -> None:
    def merged(*parts: Any) -> Any:
        result = node_of(parts[0])
        for part in parts[1:]:
            result = merge(result, node_of(part))
        return result.plain()

    def expected(base: Any, over: Any) -> Any:
        if not (isinstance(base, dict) and isinstance(over, dict)):
            return over
        both = {key: expected(base[key], over[key]) for key in base.keys() & over.keys()}
        return {**base, **over, **both}

    assert merged(a, {}) == merged({}, a) == merged(a, a) == a
    assert merged(a, b) == expected(a, b)
    assert merged(a, b, c) == expected(expected(a, b), c)
