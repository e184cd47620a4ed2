"""Lay out the documentation site: the READMEs, the pages of `docs/` and the API reference of every package.

    python scripts/documentation_site.py build/site     writes build/site/mkdocs.yml and build/site/pages; then: mkdocs build --strict

Pages keep their places, so that links between them work as in the repository; a link to anything else leads to the
repository itself. `nox -s site` does both.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from check_docs import CODE_SPAN, FENCE, LINK
from repository import Repository

# The order in which a reader wants them; every other page is found by search and by links.
GUIDES = {
    "First run": "README.md",
    "Own data and reward": "packages/rl-launcher/README.md",
    "Examples to copy": "examples/README.md",
    "From TRL": "docs/from-trl.md",
    "From verl": "docs/from-verl.md",
    "From NeMo-RL": "docs/from-nemo-rl.md",
    "How to debug a run": "packages/rl-observe/README.md",
    "Clusters": "docs/clusters.md",
    "Every key of a recipe": "packages/rl-launcher/REFERENCE.md",
    "How refit scales": "docs/scaling-refit.md",
    "Working on RL Stack": "CONTRIBUTING.md",
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
    for each in repository.packages.values():
        place = target / "pages/api" / f"{each.import_name}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"# {each.import_name}\n\n::: {each.import_name}\n")
    (target / "mkdocs.yml").write_text(json.dumps(configuration(repository, pages, url=url), indent=1))  # JSON is YAML
    print(f"{len(pages)} pages and the API of {len(repository.packages)} packages in {target}")


def pages_of(repository: Repository) -> list[Path]:
    """Return the Markdown files of the site, relative to the repository."""
    patterns = ("*.md", "docs/**/*.md", "examples/README.md", "packages/*/README.md", "packages/*/REFERENCE.md")
    tracked = {Path(name) for name in repository.git("ls-files", "-z").split("\0") if name.endswith(".md")}
    found = {path.relative_to(repository.root) for pattern in patterns for path in repository.root.glob(pattern)}
    return sorted(found & tracked)


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


def configuration(repository: Repository, pages: list[Path], *, url: str) -> dict[str, object]:
    """Return what mkdocs reads: the theme, the order of the pages, and where the sources of the API lie."""
    algorithms = "packages/rl-algorithms/README.md"
    guides = [{title: path} for title, path in GUIDES.items() if Path(path) in pages]
    packages = [{name: f"packages/{name}/README.md"} for name in repository.packages]
    api = [{each.import_name: f"api/{each.import_name}.md"} for each in repository.packages.values()]
    decisions = [path.as_posix() for path in pages if path.is_relative_to("docs/adr")]
    sources = [str(package.root / "src") for package in repository.packages.values()]
    options = {"show_root_heading": False, "members_order": "source", "show_source": False}
    handler = {"paths": sources, "options": options}
    return {
        "site_name": "RL Stack",
        "repo_url": url,
        "docs_dir": "pages",
        "theme": {"name": "material", "features": ["navigation.indexes", "content.code.copy"], "font": False},
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": handler}}}],
        "markdown_extensions": ["tables", "admonition", "pymdownx.superfences", {"toc": {"permalink": True}}],
        "validation": {"links": {"anchors": "warn", "not_found": "warn"}, "nav": {"omitted_files": "ignore"}},
        "nav": [
            {"Guides": guides},
            {"Algorithms": algorithms},
            {"Packages": packages},
            {"API reference": api},
            {"Decisions": decisions},
        ],
    }


if __name__ == "__main__":
    main()
