"""Plans that the caller brings."""

import pytest
from parallel_plans_cases.models import tiny_on_meta
from torch.distributed.tensor.parallel import ColwiseParallel

from rl_parallel_plans import PlanError, plan_for

STYLES = {"lm_head": ColwiseParallel(use_local_output=False)}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module, importable as `someones_plan`."""
    (tmp_path / "someones_plan.py").write_text(
        'plan = {"lm_head": "colwise_rep"}\n'
        "number = 7\n"
        "def build(model, tp):\n"
        '    return {"lm_head": "colwise"} if tp == 2 else {}\n'
        "def broken(model):\n"
        "    return None\n"
    )
    (tmp_path / "someones_broken_plan.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_mapping_of_styles_is_taken_as_it_is():
    plan = plan_for(tiny_on_meta("llama"), tp=2, custom=STYLES)
    assert plan.source == "custom: dict"
    assert dict(plan.styles) == STYLES


def test_function_is_called_with_the_model():
    plan = plan_for(tiny_on_meta("llama"), tp=2, custom=lambda model: {model.lm_head and "lm_head": STYLES["lm_head"]})
    assert dict(plan.styles) == STYLES


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("path", ["someones_plan:plan", "someones_plan.plan", "someones_plan:build"])
def test_import_path_of_a_mapping_or_a_function(path):
    plan = plan_for(tiny_on_meta("llama"), tp=2, custom=path)
    assert plan.source == f"custom: {path}"
    assert list(plan.styles) == ["lm_head"]


def test_lm_head_of_a_plan_of_strings_is_never_gathered():
    style = plan_for(tiny_on_meta("llama"), tp=2, custom={"lm_head": "colwise_gather_output"}).styles["lm_head"]
    assert not style.use_local_output
    assert style.output_layouts[0].is_shard()


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("no_such_module:plan", ModuleNotFoundError),
        ("someones_plan:no_such_name", AttributeError),
        ("someones_broken_plan:plan", ModuleNotFoundError),
    ],
)
def test_import_that_fails_keeps_its_cause_at_every_tp(path, cause, tp):
    with pytest.raises(PlanError, match=rf"{path!r} cannot be imported: {cause.__name__}") as refusal:
        plan_for(tiny_on_meta("llama"), tp=tp, custom=path)
    assert isinstance(refusal.value.__cause__, cause)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("custom", "message"),
    [
        ("plan", "is not an import path"),
        ("someones_plan:number", "is a int: it must be a mapping or a function"),
        ("someones_plan:broken", "returned a NoneType: it must return a mapping"),
        ({"lm_head": 3}, "pattern 'lm_head' maps to a int"),
        ({"lm_head": "columnwise"}, r"pattern 'lm_head' \(transformers .*'columnwise' is unknown"),
    ],
)
def test_what_is_no_plan_is_refused(custom, message):
    with pytest.raises(PlanError, match=message):
        plan_for(tiny_on_meta("llama"), tp=2, custom=custom)
