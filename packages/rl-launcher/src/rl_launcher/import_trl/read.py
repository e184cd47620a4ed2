"""Find the keys of TRL's dataclasses in a file: a YAML, a command in a shell script, an example script or notebook.

An example script has its keys in its code, `GRPOConfig(learning_rate=1e-5, ...)`, in a command in its docstring, or in
both; the command wins. Nothing is run: of an expression that is more than constants, names and the script's own
arguments, the value is not known, and the key is left out, which `Given.unknown` lists.
"""

import ast
import contextlib
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_launcher.errors import Refusal

COMMAND = re.compile(r"(?:\btrl[ \t]+|(?:examples|trl)/scripts/(?:\w+/)*)(\w+)(?:\.py)?[ \t]+(--.*)")
PROCESSES = re.compile(r"--num_processes[ =](\d+)")
TRAINERS = {
    "GRPOTrainer": "grpo",
    "AsyncGRPOTrainer": "async_grpo",
    "RLOOTrainer": "rloo",
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "OnlineDPOTrainer": "online_dpo",
    "CPOTrainer": "cpo",
    "KTOTrainer": "kto",
    "ORPOTrainer": "orpo",
    "RewardTrainer": "reward",
    "PPOTrainer": "ppo",
    "GKDTrainer": "gkd",
    "DistillationTrainer": "distillation",
}
"""The command that stands for each trainer; another trainer's name is its lower case."""
ADAPTERS = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
"""Keys of a command by the arguments of a LoraConfig."""
ADAPTER_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""A LoraConfig's, which are not those of a command."""


class TRLError(Refusal):
    """A file that cannot be read, or that no recipe of ours corresponds to."""


@dataclass(kw_only=True)
class Given:
    """What a file says."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of TRL's dataclasses, with their values."""

    algorithm: str | None = None
    """The command or trainer that they are for; None for a YAML, which does not say it."""

    processes: int = 1
    """How many processes the command starts."""

    rewards: list[str] = field(default_factory=list)
    """The functions that the script rewards responses with."""

    environment: str = ""
    """What its conversations are held with: a class or tools, which are Python; empty for none."""

    maps_rows: bool = False
    """Whether the script makes rows of its own from those of the data set."""

    unknown: dict[str, str] = field(default_factory=dict)
    """Keys whose values only a run of the script would show, with the expressions."""


def read(path: Path) -> Given:
    """Read one file.

    Raises:
        TRLError: it cannot be read, or holds neither a configuration, nor a command, nor a trainer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TRLError(f"{path} cannot be read: {error}") from error
    if path.suffix in {".yaml", ".yml"}:
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise TRLError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise TRLError(f"{path} is no configuration: it holds no keys")
        keys = {str(key): value_of(value) if isinstance(value, str) else value for key, value in content.items()}
        return Given(keys=keys)
    if path.suffix == ".ipynb":
        text = _code_of_notebook(path, text)
    joined = re.sub(r"\\+\s*\n\s*", " ", text)
    given, command = Given(), COMMAND.search(joined)
    if command is not None:
        line = joined[joined.rfind("\n", 0, command.start()) + 1 : command.start()]
        processes = PROCESSES.search(line)
        given = Given(
            keys=arguments_of(re.split(r"\"{3}|'{3}|`{3}", command[2])[0]),
            algorithm=command[1],
            processes=int(processes[1]) if processes else 1,
        )
    if path.suffix in {".py", ".ipynb"}:
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise TRLError(f"{path} is no valid Python: {error}") from error
        _Code(tree, given).add()
    if given.algorithm is None:
        raise TRLError(f"{path} holds no command such as `trl grpo --model_name_or_path ...`, and calls no trainer")
    return given


def _code_of_notebook(path: Path, text: str) -> str:
    """The cells of code, without lines for a shell."""
    try:
        cells = [each["source"] for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
        lines = [line for cell in cells for line in "".join(cell).splitlines()]
    except (ValueError, KeyError, TypeError) as error:
        raise TRLError(f"{path} is no notebook: {error!r}") from error
    return "\n".join(line for line in lines if not re.match(r"\s*[!%]", line))


def arguments_of(text: str) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` and `--flag` as data."""
    found: dict[str, Any] = {}
    words = shlex.split(text, comments=True, posix=True) if text.count('"') % 2 == 0 else text.split()
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].replace("-", "_").partition("=")
            key, negated = (key[3:], True) if key.startswith("no_") else (key, False)
            found[key] = value_of(value) if equals else not negated
        elif key and re.match(r"[\w./:{\[~+-]", word):
            value = value_of(word)
            found[key] = value if found[key] is True else [*listed(found[key]), value]
    return found


def value_of(text: str) -> Any:
    """A value as YAML, in which `1e-6` is a number."""
    if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def listed(value: Any) -> list[Any]:
    """`value`, or the one that it is, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


class _UnknownError(Exception):
    """The value of an expression that only a run would show."""


class _Code:
    """The code of an example script, whose keys are added to those of its command."""

    def __init__(self, tree: ast.Module, given: Given) -> None:
        self._tree, self._given = tree, given
        self._names: dict[str, ast.expr] = {}
        self._options: dict[str, Any] = {}
        self._assigned: dict[str, Any] = {}
        self._unknown: dict[str, str] = {}
        self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]

    def add(self) -> None:
        """Add what the code says."""
        given = self._given
        for call in self._calls:
            if _called(call) == "add_argument" and call.args:
                self._add_option(call)
        for name in [*given.keys]:
            if name in self._options:  # an argument of the script's own, whose code says what becomes of it
                self._options[name] = given.keys.pop(name)
        self._assign(self._tree.body)
        written: dict[str, Any] = {}
        trainer = next((call for call in self._calls if _called(call).endswith("Trainer")), None)
        own_trainer = {node.name for node in self._tree.body if isinstance(node, ast.ClassDef)}
        if trainer is not None:
            name = _called(trainer)
            if name in TRAINERS:
                given.algorithm = TRAINERS[name]
            elif name in own_trainer or given.algorithm is None:
                given.algorithm = name.removesuffix("Trainer").lower()
            written |= self._of_trainer(trainer)
        for call in self._calls:
            name = _called(call)
            if name.removesuffix("Config") + "Trainer" in TRAINERS:
                written |= self._keywords(call)
            elif name == "BitsAndBytesConfig":
                written |= {key: value for key, value in self._keywords(call).items() if key.startswith("load_in")}
            elif name == "load_dataset" and call.args and "dataset_name" not in written:
                written |= self._of_dataset(call)
            elif name == "map":
                given.maps_rows = True
            elif name == "from_pretrained" and "AutoModelFor" in ast.unparse(call.func) and call.args:
                self._try(written, "model_name_or_path", call.args[0], replace=False)
        given.keys = {**written, **self._assigned, **given.keys}
        given.unknown = {key: text for key, text in self._unknown.items() if key not in given.keys}

    # -- What is called ------------------------------------------------------------------------------------------------

    def _add_option(self, call: ast.Call) -> None:
        """`parser.add_argument("--name", default=...)`."""
        flag = next((str(each.value) for each in call.args if isinstance(each, ast.Constant)), "")
        keywords = {each.arg: each.value for each in call.keywords}
        stored = keywords.get("action")
        usual: Any = False if isinstance(stored, ast.Constant) and stored.value == "store_true" else None
        with contextlib.suppress(_UnknownError, TypeError, ValueError):
            name = self._value(keywords["dest"]) if "dest" in keywords else flag.lstrip("-").replace("-", "_")
            self._options[str(name)] = self._value(keywords["default"]) if "default" in keywords else usual

    def _of_trainer(self, call: ast.Call) -> dict[str, Any]:
        found: dict[str, Any] = {}
        keywords = {each.arg: each.value for each in call.keywords}
        self._try(found, "model_name_or_path", keywords.get("model"))
        rewards = keywords.get("reward_funcs")
        rewards = self._names.get(rewards.id, rewards) if isinstance(rewards, ast.Name) else rewards
        if isinstance(rewards, ast.List | ast.Tuple):
            self._given.rewards = [ast.unparse(each) for each in rewards.elts]
        elif rewards is not None:
            self._given.rewards = [ast.unparse(rewards)]
        for name in ("environment_factory", "tools", "rollout_func", "rollout_worker"):
            if name in keywords and not self._given.environment:
                self._given.environment = f"{name}={ast.unparse(keywords[name])}"
        adapters: ast.expr | None = None
        with contextlib.suppress(_UnknownError, TypeError, ValueError):
            adapters = self._expression(keywords.get("peft_config"))
        if isinstance(adapters, ast.Call) and _called(adapters) == "LoraConfig":
            given = {ADAPTERS.get(key, key): value for key, value in self._keywords(adapters).items()}
            found |= ADAPTER_DEFAULTS | {key: value for key, value in given.items() if key.startswith("lora_")}
        return found

    def _of_dataset(self, call: ast.Call) -> dict[str, Any]:
        """`load_dataset(name, configuration, split=...)`."""
        found: dict[str, Any] = {}
        keywords = {each.arg: each.value for each in call.keywords}
        self._try(found, "dataset_name", call.args[0])
        self._try(found, "dataset_config", call.args[1] if len(call.args) > 1 else keywords.get("name"))
        self._try(found, "dataset_train_split", keywords.get("split"))
        if isinstance(splits := found.get("dataset_train_split"), list):
            found["dataset_train_split"] = splits[0]
        if not isinstance(found.get("dataset_name"), str):  # an argument of its dataclasses, which the command names
            return {}
        return {key: value for key, value in found.items() if value is not None}

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in call.keywords:
            if each.arg is not None:
                self._try(found, each.arg, each.value)
            elif isinstance(each.value, ast.Name) and isinstance(made := self._names.get(each.value.id), ast.Call):
                found |= self._keywords(made)  # **name, of name = dict(...)
        return found

    # -- Values --------------------------------------------------------------------------------------------------------

    def _assign(self, body: Iterable[ast.stmt]) -> None:
        """Note what names mean, in the order of the text; of an `if` whose condition is known only what happens."""
        for each in body:
            match each:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    self._names.setdefault(name, value)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    pairs = zip(names, values, strict=False)
                    self._names |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="training_args"), attr=name)], value=value):
                    self._try(self._assigned, name, value)
                case ast.If(test=test, body=then, orelse=otherwise):
                    try:
                        self._assign(then if self._value(test) else otherwise)
                    except (_UnknownError, TypeError, ValueError):
                        self._assign([*then, *otherwise])
                case ast.FunctionDef(body=inner) | ast.With(body=inner) | ast.Try(body=inner):
                    self._assign(inner)

    def _try(self, found: dict[str, Any], key: str, node: ast.expr | None, *, replace: bool = True) -> None:
        if node is None or (not replace and key in found):
            return
        try:
            found[key] = self._value(node)
        except (_UnknownError, TypeError, ValueError):
            self._unknown.setdefault(key, ast.unparse(node))

    def _expression(self, node: ast.expr | None) -> ast.expr | None:
        """What a name or a choice stands for."""
        for _ in range(10):
            if isinstance(node, ast.Name) and node.id in self._names:
                node = self._names[node.id]
            elif isinstance(node, ast.IfExp):
                node = node.body if self._value(node.test) else node.orelse
            else:
                break
        return node

    def _value(self, node: ast.expr, *, depth: int = 0) -> Any:
        """The value of an expression.

        Raises:
            _UnknownError: it is not one of constants, names, arguments of the script, choices and texts of them.
        """
        if depth > 30:
            raise _UnknownError
        value = self._value
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.List(elts=each) | ast.Tuple(elts=each):
                return [value(one, depth=depth + 1) for one in each]
            case ast.Dict(keys=names, values=values) if all(names):
                pairs = zip(names, values, strict=True)
                return {value(name, depth=depth + 1): value(one, depth=depth + 1) for name, one in pairs if name}
            case ast.Name(id=name) if name in self._names:
                return value(self._names[name], depth=depth + 1)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
            case ast.Attribute(value=ast.Name(id="args"), attr=name) if name in self._options:
                return self._options[name]
            case ast.JoinedStr(values=parts):
                return "".join(str(value(part, depth=depth + 1)) for part in parts)
            case ast.FormattedValue(value=inner):
                return value(inner, depth=depth + 1)
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                return value(then if value(test, depth=depth + 1) else otherwise, depth=depth + 1)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return not value(inner, depth=depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner, depth=depth + 1)
            case ast.BoolOp(op=ast.Or(), values=[first, second]):
                return value(first, depth=depth + 1) or value(second, depth=depth + 1)
            case ast.BoolOp(op=ast.And(), values=[first, second]):
                return value(first, depth=depth + 1) and value(second, depth=depth + 1)
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return bool(value(left, depth=depth + 1) == value(right, depth=depth + 1))
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as how], comparators=[ast.Constant(value=None)]):
                return (value(left, depth=depth + 1) is None) == isinstance(how, ast.Is)
            case ast.Call(func=ast.Name(id="str" | "Path"), args=[inner]):
                return str(value(inner, depth=depth + 1))
            case ast.Call(func=ast.Name(id="len"), args=[inner]):
                return len(listed(value(inner, depth=depth + 1)))
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                return {each.arg: value(each.value, depth=depth + 1) for each in node.keywords if each.arg}
        raise _UnknownError


def _called(call: ast.Call) -> str:
    """The last name of what a call calls."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
