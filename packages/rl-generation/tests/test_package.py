import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_generation
from rl_generation import EngineSpec, Sampling, VllmOptions

README = Path(__file__).parents[1] / "README.md"
SOURCE = Path(rl_generation.__file__).parents[1]


def run(code: str) -> str:
    # `-W error` would also judge transformers; the filters of the test session hold our own warnings.
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_public_name_exists_and_says_what_it_is():
    objects = {name: getattr(rl_generation, name) for name in rl_generation.__all__}
    assert not [name for name, thing in objects.items() if not thing.__doc__]


def test_importing_the_package_loads_no_heavy_dependency():
    heavy = {"transformers", "vllm", "ray", "pydantic", "tokenizers", "huggingface_hub"}
    loaded = run("import rl_generation; print(*sys.modules)").split()
    assert not heavy & {name.partition(".")[0] for name in loaded}


@pytest.mark.parametrize("configuration", [Sampling, VllmOptions, EngineSpec], ids=lambda each: each.__name__)
def test_every_configuration_field_says_what_it_changes(configuration):
    owners = filter(dataclasses.is_dataclass, configuration.__mro__)
    text = "\n".join(Path(sys.modules[each.__module__].__file__).read_text() for each in owners)
    documented = re.findall(r'^    (\w+): [^\n]+\n    """[^"]{20,}', text, re.MULTILINE)
    assert {field.name for field in dataclasses.fields(configuration)} <= set(documented)


def test_the_first_program_of_the_readme_prints_what_the_readme_says():
    readme = README.read_text()
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    printed = re.search(r"```text\n(.*?)```", readme, re.DOTALL).group(1)
    assert run(program) == printed
