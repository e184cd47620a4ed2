"""The policy losses equal TRL's own code, values and gradients in float64, on rows of different lengths.

TRL's `_compute_loss` is run as it is, on an object that has only what the method reads; the model is a table of log-
probabilities. Every row has a trainable token: where one has none, TRL divides by it too (see `losses`).
"""

import contextlib
import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rl_algorithms import presets
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.losses import Counts
from rl_algorithms.objective import KLConfig, Objective, RatioConfig, SelectionConfig
from rl_algorithms.policy_gradient import Examples, loss

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

pytest.importorskip("trl", reason="trl is of the test group, and not installed here; the sessions of nox install it")

from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

ROWS, TOKENS, MAX_LENGTH = 8, 11, 13


class _OneProcess:
    """What the loss asks of accelerate, for one process."""

    num_processes, sync_gradients = 1, True

    def reduce(self, tensor, reduction):
        return tensor

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def pad_across_processes(self, tensor, dim, pad_index):
        return tensor


def make_case(seed):
    generator = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    logp_old = -noise(1.0).abs()
    return SimpleNamespace(
        mask=torch.arange(TOKENS) < lengths[:, None],
        logp=logp_old + noise(0.3),
        logp_old=logp_old,
        logp_ref=logp_old + noise(0.3),
        entropy=noise(1.0).abs(),
        advantage=torch.randn(ROWS, generator=generator, dtype=torch.float64),
        sampler_weight=noise(0.3).exp(),
    )


def theirs(case, loss_type, *, trainer=GRPOTrainer, **settings):
    """TRL's loss and its gradient in the log-probabilities."""
    logp = case.logp.clone().requires_grad_()
    options = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    options |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    options |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    options |= {name: settings.pop(name) for name in [*settings] if name in options}
    fields = {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "max_completion_length": MAX_LENGTH,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "current_gradient_accumulation_steps": 1,
        **settings,
    }
    one = SimpleNamespace(
        args=SimpleNamespace(**options),
        accelerator=_OneProcess(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, case.entropy, None),
        **fields,
    )
    one.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(one, *given)
    mask = case.mask.long()
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": case.advantage,
        "old_per_token_logps": case.logp_old,
        "ref_per_token_logps": case.logp_ref,
        "num_items_in_batch": mask.sum(),
    }
    with contextlib.suppress(AttributeError):  # what is logged after the loss is not compared
        total = trainer._compute_loss(one, None, inputs)
    total.backward()
    return total.detach(), logp.grad


def ours(case, objective):
    """This package's loss and its gradient, with what lies off the mask made NaN."""
    logp = case.logp.clone().requires_grad_()
    hidden = torch.where(case.mask, 0.0, torch.nan)
    examples = Examples(
        tokens=case.mask.long(),
        lengths=torch.full((ROWS,), TOKENS),
        trainable=case.mask,
        advantage=case.advantage[:, None] + hidden,
        logp_old=case.logp_old + hidden,
        logp_proximal=case.logp_old + hidden,
        logp_ref=case.logp_ref + hidden,
    )
    output = torch.stack([logp, case.entropy], -1) if objective.needs_entropy else logp
    total, _ = loss(output, examples, objective=objective, counts=Counts.of(case.mask))
    total.backward()
    return total.detach(), logp.grad


KEEP = SelectionConfig(groups_without_signal="keep")
CASES = {
    "dapo": (presets.preset("dapo"), {"loss_type": "dapo"}),
    "deepseek_grpo": (
        presets.preset("deepseek_grpo", ratio={"clip_high": 0.28}),
        {"loss_type": "grpo", "beta": 0.04},
    ),
    "dr_grpo": (
        presets.preset("dr_grpo", max_length=MAX_LENGTH, ratio={"clip_high": 0.28}),
        {"loss_type": "dr_grpo"},
    ),
    "dual clip": (Objective(ratio=RatioConfig(dual_clip=1.4)), {"loss_type": "dapo", "delta": 1.4}),
    "cispo": (presets.preset("cispo", clip_high=0.3), {"loss_type": "cispo", "epsilon_high": 1.3}),
    "gspo": (
        presets.preset("gspo", clip_low=0.01, clip_high=0.02),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
    ),
    "luspo": (
        presets.preset("luspo", clip_low=0.01, clip_high=0.02),
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
    ),
    "sapo": (presets.preset("sapo", tau_negative=1.3), {"loss_type": "sapo", "sapo_temperature_neg": 1.3}),
    "vespo": (presets.preset("vespo", k_positive=1.5), {"loss_type": "vespo", "vespo_k_pos": 1.5}),
    "gmpo": (
        presets.preset("gmpo", clip_low=0.1, clip_high=0.2),
        {"loss_type": "grpo", "trainer": GMPOTrainer, "epsilon_low": 0.1, "epsilon_high": 0.2},
    ),
    "k3 unbiased": (
        Objective(kl=KLConfig(weight=0.05, estimator="k3_unbiased")),
        {"loss_type": "dapo", "beta": 0.05, "use_bias_correction_kl": True},
    ),
    "off-policy sequences": (
        Objective(correction=CorrectionConfig(off_policy_threshold=0.02)),
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("objective", "settings"), CASES.values(), ids=CASES.keys())
def test_value_and_gradient_are_trls(objective, settings, seed):
    case = make_case(seed)
    value, gradient = theirs(case, **settings)
    own_value, own_gradient = ours(case, objective)
    torch.testing.assert_close(own_value, value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(own_gradient, gradient * case.mask, rtol=1e-12, atol=1e-14)


def test_the_tokens_of_highest_entropy_are_trls_where_a_batch_is_one_response():
    """TRL takes the share over the batch, here it is of each response: the same for a single one."""
    case = make_case(0)
    alone = SimpleNamespace(**{name: value[:1] for name, value in vars(case).items()})
    alone.mask = torch.ones_like(alone.mask)
    value, gradient = theirs(alone, "dapo", top_entropy_quantile=0.3)
    objective = presets.preset("high_entropy", share=0.3)
    logp = alone.logp.clone().requires_grad_()
    examples = Examples(
        tokens=alone.mask.long(),
        lengths=torch.full((1,), TOKENS),
        trainable=alone.mask,
        advantage=alone.advantage[:, None].expand(1, TOKENS),
        logp_old=alone.logp_old,
        logp_proximal=alone.logp_old,
        logp_ref=alone.logp_ref,
    )
    output = torch.stack([logp, alone.entropy], -1)
    total, sums = loss(output, examples, objective=objective, counts=Counts.of(alone.mask))
    total.backward()
    assert 0 < sums["selected_fraction"] < TOKENS
    torch.testing.assert_close(total.detach(), value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-12, atol=1e-14)
