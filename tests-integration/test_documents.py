"""Every code block of the READMEs and guides does what it says; a mark beside the others says which test runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from code_blocks import blocks_of, documents
from repository import Repository

PAGES = {
    str(page.relative_to(ROOT)): [block for block in blocks_of(page) if block.is_code and not block.mark.run_by]
    for page in documents(Repository.read(ROOT))
}
NIGHTLY = [name for name, blocks in PAGES.items() if any(block.mark.nightly for block in blocks)]
QUICK = [name for name, blocks in PAGES.items() if any(not block.mark.nightly for block in blocks)]


def run(*arguments):
    command = [sys.executable, str(ROOT / "scripts/run_code_blocks.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=3600)


@pytest.mark.parametrize("page", QUICK)
def test_the_blocks_of_a_page_do_what_they_say(page):
    done = run(str(ROOT / page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ") >= sum(not block.mark.nightly for block in PAGES[page])


@pytest.mark.slow
@pytest.mark.parametrize("page", NIGHTLY)
def test_the_long_blocks_of_a_page_do_what_they_say(page):
    done = run(str(ROOT / page), "--nightly")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_and_guide_has_blocks_that_run():
    assert sum(block.is_run_here for blocks in PAGES.values() for block in blocks) >= 35
    assert {f"packages/{name}/README.md" for name in Repository.read(ROOT).packages} <= {*QUICK}
