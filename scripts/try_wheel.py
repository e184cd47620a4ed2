"""Test a package as a user has it: installed from its wheel, with its declared dependencies and nothing else.

    python try_wheel.py rl_refit README.md --absent rl-launcher ray --lazy ray vllm megatron

It fails if a distribution of `--absent` is installed, if importing the package loads a module of `--lazy`, if the
wheel lacks its licence text, its URLs or a README whose links work anywhere, or if the first ```python block of the
README does not run as it is written. It uses only the standard library, since nothing else
may be installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FENCE = re.compile(r"^(```|~~~).*?^\1\s*?$", flags=re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the three checks; exit with the first complaint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="import name")
    parser.add_argument("readme", type=Path)
    parser.add_argument("--absent", nargs="*", default=[], help="distributions that must not be installed")
    parser.add_argument("--lazy", nargs="*", default=[], help="modules that the import must not load")
    arguments = parser.parse_args()
    complaints = [
        *unwanted_distributions(arguments.absent),
        *loaded_modules(arguments.package, arguments.lazy),
        *metadata_faults(arguments.package, arguments.readme),
        *readme_failure(arguments.readme),
    ]
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"{arguments.package} installs, imports and runs its README with what it declares")


def unwanted_distributions(absent: list[str]) -> list[str]:
    """Return which of `absent` are installed."""
    installed = {_normal(found.name): found.version for found in importlib.metadata.distributions()}
    return [
        f"{name} {installed[_normal(name)]} is installed, though nothing declares it"
        for name in absent
        if _normal(name) in installed
    ]


def loaded_modules(package: str, lazy: list[str]) -> list[str]:
    """Return which of `lazy` a new interpreter loads when it imports `package`."""
    code = f"import sys, {package}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if run.returncode:
        return [f"`import {package}` fails:\n{run.stderr}"]
    loaded = set(run.stdout.split())
    return [f"`import {package}` loads {name}: import it where it is used" for name in lazy if name in loaded]


def metadata_faults(package: str, readme: Path) -> list[str]:
    """Return what a reader on a package index would miss: the licence, a way to the source, links that lead there."""
    found = importlib.metadata.distribution(package)
    licences = [path for path in found.files or [] if "licenses/" in str(path)]
    faults = []
    if not any("Apache License" in path.read_text() for path in licences):
        faults.append(f"the wheel of {package} has no licence text")
    urls = [url.partition(",")[0] for url in found.metadata.get_all("Project-URL") or []]
    absent = [name for name in ("Source", "Changelog", "Issues") if name not in urls]
    faults += [f"the wheel of {package} names no {name} among its URLs" for name in absent]
    faults += [] if found.metadata.get_all("Author") else [f"the wheel of {package} names no author"]
    text = found.metadata.json["description"]
    assert isinstance(text, str)
    blocks = [[match[0] for match in FENCE.finditer(page)] for page in (text, readme.read_text(encoding="utf-8"))]
    faults += [] if blocks[0] == blocks[1] else [f"the README in the wheel of {package} has other code than {readme}"]
    prose = re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))
    relative = [link for link in re.findall(r"\]\(([^)\s]+)", prose) if not re.match(r"[a-z]+:|#", link)]
    return faults + [f"the README in the wheel of {package} links to {link}, which is not there" for link in relative]


def readme_failure(readme: Path) -> list[str]:
    """Run the README's first program in an empty directory, and return how it failed."""
    program = first_program(readme.read_text(encoding="utf-8"))
    if program is None:
        return [f"{readme} has no ```python block: a reader has nothing to run"]
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "readme.py"
        script.write_text(program, encoding="utf-8")
        code = subprocess.run([sys.executable, str(script)], check=False, cwd=directory).returncode
    return [f"the first program of {readme} ends with exit code {code}"] if code else []


def first_program(markdown: str) -> str | None:
    """Return the first block fenced with ```python, as written, or None."""
    found = re.search(r"^```python[^\n]*\n(.*?)^```\s*$", markdown, flags=re.MULTILINE | re.DOTALL)
    return found[1] if found else None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
