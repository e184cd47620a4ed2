"""Plans by qualified name: found through wrappers, brought by other distributions, never silently replaced."""

import sys

import pytest
from parallel_plans_cases.models import tiny_on_meta
from torch import nn

from rl_parallel_plans import PlanError, plan_for, qualified_name, register_plan
from rl_parallel_plans.plan import registry

LLAMA = "transformers.models.llama.modeling_llama.LlamaForCausalLM"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_builders", {})
    monkeypatch.setattr(registry, "_loaded_entry_points", set())


def only_lm_head(model):
    return {"lm_head": "colwise"}


def test_qualified_name_is_module_and_qualname():
    assert qualified_name(nn.Linear) == "torch.nn.modules.linear.Linear"


def test_registered_plan_goes_before_the_structure():
    register_plan(LLAMA)(only_lm_head)
    plan = plan_for(tiny_on_meta("llama"), tp=2)
    assert plan.source == f"registered: {LLAMA}"
    assert list(plan.styles) == ["lm_head"]


def test_class_wrapped_by_a_mixin_finds_the_plan_of_what_it_wraps():
    register_plan(LLAMA)(only_lm_head)
    model = tiny_on_meta("llama")
    mixin = type("Mixin", (), {})
    model.__class__ = type("Wrapped", (mixin, type(model)), {})
    assert plan_for(model, tp=2).source == f"registered: {LLAMA}"


def test_wrapper_that_takes_the_name_of_what_it_wraps_finds_its_plan():
    register_plan(LLAMA)(only_lm_head)
    model = tiny_on_meta("llama")
    original = type(model)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    model.__class__ = type(original.__name__, (original,), names)
    assert type(model) is not original
    assert plan_for(model, tp=2).source == f"registered: {LLAMA}"


def test_builder_that_asks_for_tp_gets_it():
    seen = []

    @register_plan(LLAMA)
    def plan(model, *, tp):
        seen.append(tp)
        return only_lm_head(model)

    plan_for(tiny_on_meta("llama"), tp=2)
    assert seen == [2]


def test_second_plan_for_a_class_is_refused_and_the_first_may_be_registered_again():
    register_plan(LLAMA)(only_lm_head)
    register_plan(LLAMA)(only_lm_head)
    with pytest.raises(PlanError, match=r"has two plans, .*only_lm_head and .*lambda"):
        register_plan(LLAMA)(lambda _: {})


def distribution(folder, *, value):
    """An installed distribution with one entry point."""
    info = folder / "someones_plans-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-plans\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rl_parallel_plans]\nllama = {value}\n")


def test_entry_point_of_another_distribution_registers_plans(tmp_path, monkeypatch):
    distribution(tmp_path, value="someones_plans")
    (tmp_path / "someones_plans.py").write_text(
        f'from rl_parallel_plans import register_plan\n\n@register_plan("{LLAMA}")\ndef plan(model):\n'
        '    return {"lm_head": "colwise"}\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "someones_plans", raising=False)
    assert plan_for(tiny_on_meta("llama"), tp=2).source == f"registered: {LLAMA}"


def test_entry_point_that_fails_is_named_each_time(tmp_path, monkeypatch):
    distribution(tmp_path, value="no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"'llama = no_such_module' of someones-plans .* ModuleNotFoundError") as e:
            plan_for(tiny_on_meta("llama"), tp=2)
        assert isinstance(e.value.__cause__, ModuleNotFoundError)


def _remote(model, module):
    """The model as an instance of a class that was downloaded with it."""
    bases = (nn.Module,)
    model.__class__ = type("LlamaForCausalLM", bases, {"__module__": module, "config": model.config})
    return model


def test_downloaded_code_is_known_by_its_bare_name():
    register_plan("transformers_modules.somebody.modeling_llama.LlamaForCausalLM")(only_lm_head)
    plan = plan_for(_remote(tiny_on_meta("llama"), "transformers_modules.somebody.0a1b2c.modeling_llama"), tp=2)
    assert plan.source == "registered: transformers_modules.somebody.modeling_llama.LlamaForCausalLM"


def test_bare_name_of_another_package_is_not_taken_for_it():
    register_plan(LLAMA)(only_lm_head)
    with pytest.raises(PlanError, match=r"registered: no plan for another_package.llama.LlamaForCausalLM"):
        plan_for(_remote(tiny_on_meta("llama"), "another_package.llama"), tp=2)


def test_two_plans_under_one_bare_name_are_both_named():
    register_plan(LLAMA)(only_lm_head)
    register_plan("another_package.llama.LlamaForCausalLM")(only_lm_head)
    with pytest.raises(PlanError, match=r"2 plans are registered: \['another_package.*', 'transformers.models"):
        plan_for(_remote(tiny_on_meta("llama"), "transformers_modules.x"), tp=2)
