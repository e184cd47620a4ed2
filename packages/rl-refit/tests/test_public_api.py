"""What others build on: names, signatures, the README, and an import that costs nothing beside torch."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_refit

README = Path(__file__).parents[1] / "README.md"

SIGNATURES = {
    "Layout.from_boxes": "(boxes)",
    "Layout.from_placements": "(mesh_shape, placements, *, ranks)",
    "Layout.from_tensor": "(tensor)",
    "Manifest.hash": "(self)",
    "ModuleSink": "(module, *, mode, before_commit, on_commit, rename, bindings, derived, constant, wait_s)",
    "ModuleSource": "(module, *, rename, bindings, exclude, cast)",
    "Refit": "(source, sink, transport, *, rendezvous, bucket_bytes, buckets, deadline_s, verify)",
    "Refit.__call__": "(self, version)",
    "Refit.receive": "(self, *, timeout_s)",
    "Replica": (
        "(sink, *, name, trainer, address, rank, num_ranks, transport, in_turn, from_peers, liveness_s, trainer_name, "
        "bucket_bytes, buckets, deadline_s)"
    ),
    "Replica.close": "(self)",
    "Replica.receive": "(self, *, timeout_s)",
    "Replicas": (
        "(source, *, address, num_sources, source_rank, at_least, transport, liveness_s, name, bucket_bytes, buckets, "
        "deadline_s, verify)"
    ),
    "Replicas.__call__": "(self, version, *, rollback)",
    "Replicas.catch_up": "(self)",
    "Replicas.close": "(self)",
    "Replicas.joined": "(self)",
    "RefitPlan.bytes_received": "(self, rank)",
    "RefitPlan.explain": "(self, *, bucket_bytes)",
    "RefitPlan.lower_bound": "(self, rank)",
    "WeightSink.abort": "(self)",
    "WeightSink.commit": "(self, version)",
    "WeightSink.digest": "(self, regions)",
    "WeightSink.check": "(self)",
    "WeightSink.poison": "(self, reason)",
    "WeightSink.prepare": "(self, manifest)",
    "WeightSink.ready": "(self, version)",
    "WeightSink.repeat": "(self)",
    "WeightSink.rewind": "(self, version)",
    "WeightSink.stage": "(self, region, tensor, *, stays)",
    "WeightSource.manifest": "(self)",
    "WeightSource.shards": "(self, names)",
    "plan_refit": "(source, sink, topology)",
}


@pytest.mark.parametrize(("path", "expected"), SIGNATURES.items())
def test_signatures_stay(path, expected):
    thing = rl_refit
    for name in path.split("."):
        thing = getattr(thing, name)
    parameters = [p.replace(default=p.empty, annotation=p.empty) for p in inspect.signature(thing).parameters.values()]
    assert str(inspect.Signature(parameters)) == expected


def test_every_public_name_exists_and_has_a_docstring():
    assert rl_refit.__all__ == sorted(rl_refit.__all__)
    assert [name for name in rl_refit.__all__ if not inspect.getdoc(getattr(rl_refit, name))] == []


def test_every_public_name_is_in_the_readme():
    text = README.read_text()
    assert [name for name in rl_refit.__all__ if f"`{name}" not in text] == []


IMPORTED = """
import sys, torch
before = set(sys.modules)
import rl_refit
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(*sorted(name for name in sys.modules if name.startswith(("torch.distributed.tensor", "torch.distributed.fsdp"))))
"""


def test_importing_it_imports_nothing_beside_torch_and_the_standard_library():
    result = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    packages, distributed = result.stdout.split("\n")[:2]
    assert set(packages.split()) <= {"rl_refit", *sys.stdlib_module_names}
    assert distributed == ""


def test_no_pickle_is_imported_anywhere():
    for path in Path(rl_refit.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "save", "load"} & set(names), path


ERRORS = [
    rl_refit.RefitError("refused", phase="transfer", tensor="w", bucket=3),
    rl_refit.CoverageError("differs", unfed=("a",), unmapped=("b",), mismatched=("c: shape",)),
    rl_refit.DigestError("differs", tensors=("a", "b")),
    rl_refit.DeadlineError("late", phase="verify", bucket=1, seconds=2.0),
    rl_refit.PoisonedError("torn", phase="commit"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_cross_a_process_boundary_whole(error):
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert isinstance(copy, rl_refit.RefitError)
    assert isinstance(copy, RuntimeError)


@pytest.mark.parametrize("imports", ["multiprocessing, tempfile, torch", "multiprocessing, socket, time, torch"])
def test_the_programs_of_the_readme_print_what_it_shows(imports):
    pair = rf"```python\n(import {imports}\n.*?)```\n\n```text\n(.*?)```"
    program, shown = re.search(pair, README.read_text(), re.DOTALL).groups()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)

    def without_figures(text):
        return re.sub(r"process \d+", "process …", re.sub(r"[\d.]+ ms \(.*?\)", "… ms", text.strip()))

    assert without_figures(result.stdout) == without_figures(shown)
