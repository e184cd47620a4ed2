import re
import subprocess
import sys
from pathlib import Path

import rl_generation

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


def test_the_public_names_are_these():
    assert rl_generation.__all__ == [
        "LogpAgreement",
        "LogpError",
        "ModelError",
        "PromptError",
        "Rollout",
        "Sampling",
        "TransformersEngine",
        "verify_logp",
    ]
    assert all(hasattr(rl_generation, name) for name in rl_generation.__all__)


def test_importing_the_package_loads_no_heavy_dependency():
    heavy = {"transformers", "vllm", "ray", "pydantic", "tokenizers", "huggingface_hub"}
    loaded = run("import rl_generation; print(*sys.modules)").split()
    assert not heavy & {name.partition(".")[0] for name in loaded}


def test_every_configuration_field_says_what_it_changes():
    text = Path(rl_generation.sampling.__file__).read_text()
    fields = re.findall(r'^    (\w+): [^\n]+\n    """[^"]{20,}', text, re.MULTILINE)
    assert {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed"} == set(fields)


def test_the_first_program_of_the_readme_prints_what_the_readme_says():
    readme = README.read_text()
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    printed = re.search(r"```text\n(.*?)```", readme, re.DOTALL).group(1)
    assert run(program) == printed
