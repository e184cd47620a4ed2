"""Claims about an absent, old or new megatron-core: refused by name before it is imported, and nobody else cares."""

import importlib
import importlib.util
import re
import subprocess
import sys
from importlib import metadata

import pytest

from rl_backends.errors import MissingDependencyError
from rl_backends.megatron import installed


@pytest.fixture
def pretend_installed(monkeypatch):
    """`pretend_installed(megatron, psutil)`: releases as metadata names them; importing anything is a failure."""

    def pretend(*, megatron, psutil=True):
        def version(name, real=metadata.version):
            if name != "megatron-core":
                return real(name)
            if megatron is None:
                raise metadata.PackageNotFoundError(name)
            return megatron

        def find_spec(name, real=importlib.util.find_spec):
            return (object() if psutil else None) if name == "psutil" else real(name)

        def refuse(name):
            raise AssertionError(f"{name} was imported")

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(importlib, "import_module", refuse)
        return installed.require_megatron.__wrapped__  # every call looks anew

    return pretend


@pytest.mark.parametrize(
    ("release", "said"),
    [
        (None, "megatron-core is not installed, and >=0.16,<0.17 is needed"),
        ("0.15.3", "megatron-core 0.15.3 is installed, and >=0.16,<0.17 is needed"),
        ("0.16.0rc1", "megatron-core 0.16.0rc1 is installed, and >=0.16,<0.17 is needed"),
        ("0.17.0", "megatron-core 0.17.0 is installed, and >=0.16,<0.17 is needed"),
        ("1.0", "megatron-core 1.0 is installed, and >=0.16,<0.17 is needed"),
    ],
)
def test_another_release_is_refused_before_it_is_imported(pretend_installed, release, said):
    with pytest.raises(MissingDependencyError) as refusal:
        pretend_installed(megatron=release)()
    assert said in str(refusal.value)
    assert 'pip install "rl-backends[megatron]"' in str(refusal.value)


@pytest.mark.parametrize("release", ["0.16.0", "0.16.1", "0.16.1+cu13", "0.16.9.post1"])
def test_a_release_of_the_tested_line_is_imported(pretend_installed, release):
    with pytest.raises(AssertionError, match=r"^megatron\.core was imported"):
        pretend_installed(megatron=release)()


def test_psutil_is_asked_for_because_saving_would_hang_without_it(pretend_installed):
    with pytest.raises(MissingDependencyError, match=r"psutil is not installed, without which .* never return"):
        pretend_installed(megatron="0.16.1", psutil=False)()


def test_all_that_is_missing_is_said_at_once(pretend_installed):
    with pytest.raises(MissingDependencyError, match=r"megatron-core is not installed.*; psutil is not installed"):
        pretend_installed(megatron=None, psutil=False)()


WITHOUT_MEGATRON = """
import importlib.abc, importlib.metadata, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
real_version = importlib.metadata.version

def version(name):
    if name == "megatron-core":
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)

importlib.metadata.version = version

import rl_backends
import rl_backends.dtensor.backend
from rl_backends.megatron.config import MegatronConfig

for name in rl_backends.__all__:
    if not rl_backends._HOMES[name].startswith("megatron."):
        getattr(rl_backends, name)
MegatronConfig()

from rl_backends.errors import MissingDependencyError
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.installed import require_megatron

try:
    with cpu_compat():
        raise SystemExit("Megatron was there")
except MissingDependencyError as error:
    print(error)
assert not [name for name in sys.modules if name.split(".")[0] == "megatron"]
"""


def test_everything_else_works_where_megatron_cannot_be_imported():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "megatron-core is not installed" in done.stdout


FIRST_IMPORT = """
import logging, os, sys, threading, warnings
import torch

before = list(warnings.filters), list(logging.getLogger().handlers), threading.active_count()
from rl_backends.megatron.installed import require_megatron

assert not [name for name in sys.modules if name.split(".")[0] == "megatron"]
require_megatron()
require_megatron()
assert "megatron.core.models.gpt.gpt_model" in sys.modules
assert before == (list(warnings.filters), list(logging.getLogger().handlers), threading.active_count())
"""


@pytest.mark.skipif(not list(metadata.distributions(name="megatron-core")), reason="needs megatron-core")
def test_the_first_import_is_silent_and_changes_no_filter_and_no_logger():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FIRST_IMPORT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    # What torch 2.15 logs of torchao 0.18, which transformers imports where it is, and of a CUDA without a GPU.
    others = re.compile(r"^W.* torch/utils/(_pytree|cpp_extension)\.py:.*\n", re.MULTILINE)
    assert (done.stdout, others.sub("", done.stderr)) == ("", "")
