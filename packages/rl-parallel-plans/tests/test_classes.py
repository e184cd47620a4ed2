"""The table of classes: a cell says what was done, a second run goes on where the first ended, a defect shows."""

import json
from dataclasses import replace

import pytest
from torch import nn

from rl_parallel_plans import VerifyReport
from rl_parallel_plans.__main__ import main
from rl_parallel_plans.verification import classes
from rl_parallel_plans.verification.report import Check

ERRORS = {"forward and backward: logits": ("ok", 3e-7), "forward and backward: gradients": ("ok", 1e-6)}


def result(column, outcome="exact", **changes):
    changes = {"checks": ERRORS if outcome in ("exact", "WRONG") else {}, "versions": classes.versions(), **changes}
    return classes.Result(name="Model", column=column, outcome=outcome, **changes)


def row(*results):
    lines = classes.table(results).splitlines()
    return next([cell.strip() for cell in line.split(" | ")] for line in lines if line.startswith("| `Model`"))


PLANNED = result("plan", "planned", source="structure", own_plan="8 rules translated")


def test_a_class_is_planned_or_refused_and_why():
    found = [classes.measured(name, "plan", None) for name in ("LlamaForCausalLM", "DogeForCausalLM")]
    assert [each.outcome for each in found] == ["planned", "refused"]
    assert found[0].source == "structure"
    assert "self_attn.A" in found[1].reason


def test_a_defect_is_no_refusal():
    class Broken(nn.Module):
        def named_modules(self, *_, **__):
            raise KeyError("a defect")

    assert classes.plan_result(Broken()).outcome == "crashed"
    assert classes.is_wrong(classes.plan_result(Broken()))


def test_a_plan_alone_is_not_called_verified():
    assert row(PLANNED)[1:5] == ["structure", "–", "–", "–"]


def test_a_verified_cell_has_the_errors_that_verifycells_measured():
    assert row(PLANNED, result("TP2"))[1:4] == ["structure", "3e-07 / 1e-06", "–"]


def test_what_only_the_rounding_of_the_model_itself_excuses_is_marked():
    checks = {**ERRORS, "odd length: gradients": ("ok", 5e-4)}
    assert row(PLANNED, result("TP2", checks=checks))[2] == "≈ 3e-07 / 5e-04"


def test_what_is_wrong_refused_or_skipped_is_a_footnote_with_its_reason():
    cells = {
        outcome: result("TP2+SP", outcome, reason=f"because {outcome}") for outcome in ("WRONG", "refused", "skipped")
    }
    for outcome, cell in cells.items():
        text = classes.table([PLANNED, cell])
        assert row(PLANNED, cell)[3] == (f"**{outcome}** [1]" if outcome == "WRONG" else f"{outcome} [1]")
        assert f"[1] because {outcome}" in text


@pytest.mark.parametrize(
    ("verdicts", "shown"), [([], "–"), (["ok"], "exact"), (["ok", "WRONG"], "**WRONG**"), (["skipped"], "skipped")]
)
def test_the_round_trip_of_a_checkpoint_is_a_column_of_its_own(verdicts, shown):
    checks = {f"checkpoint {number}": (verdict, None) for number, verdict in enumerate(verdicts)}
    assert row(PLANNED, result("TP2", checks={**ERRORS, **checks}))[4] == shown


def test_a_model_that_cannot_be_built_is_skipped_and_not_refused():
    report = VerifyReport(model="M", layout="tp=2", source="", checks=(), refused="cannot be built by transformers")
    assert classes.verified_result("Model", "TP2", report).outcome == "refused"
    assert classes.verified_result("Model", "TP2", replace(report, unusable=True)).outcome == "skipped"


def test_a_wrong_check_makes_the_cell_wrong_with_its_culprit():
    check = Check(name="odd length: gradients", verdict="WRONG", culprits=("q_norm: norm 0.5",))
    report = VerifyReport(model="M", layout="tp=2", source="structure", checks=(check,))
    assert classes.verified_result("Model", "TP2", report).reason == "odd length: gradients: q_norm: norm 0.5"


@pytest.fixture
def cells_measured(monkeypatch):
    """Names of the cells in the order in which they are measured; every TP2+SP is wrong."""
    cells = []

    def measured(name, column, _):
        cells.append((name, column))
        return replace(result(column, "WRONG" if column == "TP2+SP" else "exact"), name=name)

    monkeypatch.setattr(classes, "measured", measured)
    return cells


def run(tmp_path, *options, names=("Model", "OtherForConditionalGeneration")):
    return main(["classes", *names, "--results", str(tmp_path / "results.jsonl"), *options])


def test_a_second_run_measures_what_the_first_has_not(tmp_path, cells_measured, capsys):
    assert run(tmp_path, "--seconds", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left"] == 6
    assert cells_measured == []
    assert run(tmp_path, "--json", names=["Model"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["ok"], told["left"], told["counts"]["TP2"]) == (False, 0, {"exact": 1})
    assert run(tmp_path, "--write", str(tmp_path / "CLASSES.md")) == 1
    assert len(cells_measured) == len(set(cells_measured)) == 6
    assert "| `Model` |" in (tmp_path / "CLASSES.md").read_text()


def test_a_result_cut_short_by_an_interruption_is_measured_again(tmp_path, cells_measured):
    run(tmp_path, names=["Model"])
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text()[:-30])
    run(tmp_path, names=["Model"])
    assert cells_measured[-1] == ("Model", "TP2+SP")
    assert len(cells_measured) == 4
    run(tmp_path, names=["Model"])
    assert len(cells_measured) == 4


def test_results_of_another_source_are_measured_again_or_kept_where_they_are_good(
    tmp_path, cells_measured, monkeypatch, capsys
):
    run(tmp_path, names=["Model"])
    monkeypatch.setattr(classes, "versions", lambda: "another source")
    page = tmp_path / "CLASSES.md"
    assert run(tmp_path, "--seconds", "0", "--json", "--write", str(page), names=["Model"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left"] == 3
    assert "`Model`" not in page.read_text()
    assert run(tmp_path, "--seconds", "0", "--keep", "--json", "--write", str(page), names=["Model"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left"] == 1  # what was wrong, which is still shown
    assert "3 of 3 results were made with other releases or another source" in page.read_text()
    assert len(cells_measured) == 3
