"""Lay out the documentation site: the READMEs, the pages of `docs/` and the API reference of every package.

    python scripts/documentation_site.py build/site     writes mkdocs.yml and pages/ there; then: mkdocs build --strict

Pages keep their places, so that links between them work as in the repository; a link to anything else leads to the
repository itself. The page of algorithms is what `rl-algorithms explain` says of each. `nox -s site` does all of it.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from check_docs import CODE_SPAN, FENCE, LINK
from repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator

# The order in which a reader wants them; every other page is found by search and by links.
GUIDES = {
    "First run": "README.md",
    "Own data and reward": "docs/own-data-and-reward.md",
    "Examples to copy": "examples/README.md",
    "From TRL": "docs/from-trl.md",
    "From verl": "docs/from-verl.md",
    "From NeMo-RL": "docs/from-nemo-rl.md",
    "How to debug a run": "docs/debugging.md",
    "Clusters": "docs/clusters.md",
    "Every key of a recipe": "packages/rl-launcher/REFERENCE.md",
    "How refit scales": "docs/scaling-refit.md",
    "Working on RL Stack": "CONTRIBUTING.md",
    "Releasing": "docs/releasing.md",
}


def main() -> None:
    """Write the pages and the configuration into the directory that is named."""
    repository = Repository.read(Path.cwd())
    target = Path(sys.argv[1]).resolve()
    shutil.rmtree(target, ignore_errors=True)
    pages = pages_of(repository)
    package = next(iter(repository.packages.values()))
    url = str(package.pyproject["project"]["urls"]["Source"])
    for page in pages:
        place = target / "pages" / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(with_links(repository.root, page, pages=pages, url=url))
    api = {
        name: [each.import_name, *public_modules(each.root / "src", each.import_name)]
        for name, each in repository.packages.items()
    }
    for module in (module for modules in api.values() for module in modules):
        place = target / "pages/api" / f"{module}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"# {module}\n\n::: {module}\n")
    (target / "pages/algorithms.md").write_text("".join(algorithms()))
    settings = configuration(repository, pages, api, url=url)
    (target / "mkdocs.yml").write_text(json.dumps(settings, indent=1))  # JSON is YAML
    print(f"{len(pages)} pages and the API of {len(repository.packages)} packages in {target}")


def pages_of(repository: Repository) -> list[Path]:
    """Return the Markdown files of the site, relative to the repository."""
    patterns = ("*.md", "docs/**/*.md", "examples/README.md", "packages/*/README.md", "packages/*/REFERENCE.md")
    tracked = {Path(name) for name in repository.git("ls-files", "-z").split("\0") if name.endswith(".md")}
    found = {path.relative_to(repository.root) for pattern in patterns for path in repository.root.glob(pattern)}
    return sorted(found & tracked)


def public_modules(source: Path, package: str) -> list[str]:
    """Return the modules with public names, where those of the package itself are none: `rl_algorithms.grpo`."""
    if _names(source / package / "__init__.py"):
        return []
    files = [*source.glob(f"{package}/*.py"), *source.glob(f"{package}/*/__init__.py")]
    modules = {file.relative_to(source).with_suffix("") for file in files if _names(file)}
    dotted = (".".join(module.parts).removesuffix(".__init__") for module in modules)
    return sorted(name for name in dotted if "__" not in name)


def _names(file: Path) -> list[str]:
    """Return `__all__` of a module, without importing it."""
    for line in ast.parse(file.read_text()).body:
        if isinstance(line, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in line.targets):
            return [str(name) for name in ast.literal_eval(line.value)]
    return []


def algorithms() -> Iterator[str]:
    """Yield the page of algorithms: what each is, with its papers, and its formula with the values by default."""
    import contextlib
    import inspect
    import io

    from rl_algorithms.__main__ import LOSSES, main

    yield "# Algorithms\n\nWhat each minimizes with its values by default, as `rl-algorithms explain NAME` prints it. "
    yield "A number that has no default, such as `max_length`, is 1024.\n"
    for name, (make, _) in LOSSES.items():
        required = [p.name for p in inspect.signature(make).parameters.values() if p.default is inspect.Parameter.empty]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["explain", name, *(f"{each}=1024" for each in required)])
        if code:
            sys.exit(f"rl-algorithms explain {name} ended with {code}: {printed.getvalue()}")
        yield f"\n## {name}\n\n{inspect.getdoc(make)}\n\n```text\n{printed.getvalue().strip()}\n```\n"


def with_links(root: Path, page: Path, *, pages: list[Path], url: str) -> str:
    """Return the text of a page, in which a link to a file that is no page leads to the repository."""
    text = (root / page).read_text()
    hidden = [*FENCE.finditer(text), *CODE_SPAN.finditer(text)]

    def replaced(match: re.Match[str]) -> str:
        target = match[1]
        if re.match(r"[a-z][a-z0-9+.-]*:|#", target) or any(m.start() <= match.start() < m.end() for m in hidden):
            return match[0]
        path, mark, anchor = target.partition("#")
        file = (root / page.parent / path).resolve().relative_to(root.resolve())
        if file in pages:
            return match[0]
        return match[0].replace(f"({target}", f"({url}/blob/main/{file.as_posix()}{mark}{anchor}")

    return LINK.sub(replaced, text)


def configuration(
    repository: Repository, pages: list[Path], api: dict[str, list[str]], *, url: str
) -> dict[str, object]:
    """Return what mkdocs reads: the theme, the order of the pages, and where the sources of the API lie."""
    if absent := [path for path in GUIDES.values() if Path(path) not in pages]:
        sys.exit(f"the site names pages that do not exist: {', '.join(absent)}")
    guides = [{title: path} for title, path in GUIDES.items()]
    packages = [{name: f"packages/{name}/README.md"} for name in repository.packages]
    reference = [{name: [{module: f"api/{module}.md"} for module in modules]} for name, modules in api.items()]
    decisions = [path.as_posix() for path in pages if path.is_relative_to("docs/adr")]
    sources = [str(package.root / "src") for package in repository.packages.values()]
    options = {"show_root_heading": False, "members_order": "source", "show_source": False}
    handler = {"paths": sources, "options": options}
    return {
        "site_name": "RL Stack",
        "repo_url": url,
        "docs_dir": "pages",
        "theme": {"name": "material", "features": ["content.code.copy"], "font": False},
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": handler}}}],
        "markdown_extensions": ["tables", "admonition", "pymdownx.superfences", {"toc": {"permalink": True}}],
        "validation": {"links": {"anchors": "warn", "not_found": "warn"}, "nav": {"omitted_files": "ignore"}},
        "nav": [
            {"Guides": guides},
            {"Algorithms": "algorithms.md"},
            {"Packages": packages},
            {"API reference": reference},
            {"Decisions": decisions},
        ],
    }


if __name__ == "__main__":
    main()
