"""The policy losses and advantages equal numbers of verl's own functions, values and gradients in float64.

`fixtures/verl_b178a3c.json` has inputs and what `verl/trainer/ppo/core_algos.py` of that commit makes of them: rows of
different lengths, clip 0.2 and 0.3, tau 1 and 1.3, dual clip 3. Where verl differs, the test says how.
"""

import json
from pathlib import Path

import pytest
import torch

from rl_algorithms import advantages, presets
from rl_algorithms.losses import Counts
from rl_algorithms.objective import Objective, RatioConfig
from rl_algorithms.policy_gradient import Examples, loss, select_tokens

VERL = json.loads((Path(__file__).parent / "fixtures" / "verl_b178a3c.json").read_text())
LOGP, LOGP_OLD = (torch.tensor(VERL[name], dtype=torch.float64) for name in ("logp", "logp_old"))
LENGTHS, GROUPS = torch.tensor(VERL["lengths"]), torch.tensor(VERL["groups"])
MASK = torch.arange(LOGP.shape[1]) < LENGTHS[:, None]
REWARDS = torch.tensor(VERL["rewards"], dtype=torch.float64)
PADDED = LOGP.shape[1]

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES = {
    "sapo": presets.preset("sapo", tau_negative=1.3),
    "gpg": presets.preset("gpg"),
    "geo_mean": presets.preset("gmpo", **CLIP),
    "gspo": presets.preset("gspo", **CLIP),
    "cispo": Objective(ratio=RatioConfig(surrogate="cispo", **CLIP)),
    # Its L is the padded width where loss_scale_factor is not set, and there is no 1 / N_seq.
    "vanilla": presets.preset("dr_grpo", max_length=PADDED, ratio={**CLIP, "dual_clip": 3.0}),
    # Its covariance is of the log-probabilities now; ours of those before the batch's first step, where both agree.
    "kl_cov": presets.preset("kl_cov", share=0.1, kl_weight=2.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_verls(name):
    expected, objective = VERL["losses"][name], LOSSES[name]
    logp = (LOGP_OLD if name == "kl_cov" else LOGP).clone().requires_grad_()
    hidden = torch.where(MASK, 0.0, torch.nan)
    examples = Examples(
        tokens=MASK.long(),
        lengths=LENGTHS,
        trainable=MASK,
        advantage=torch.tensor(VERL["advantage"], dtype=torch.float64)[:, None] + hidden,
        logp_old=LOGP_OLD + hidden,
        logp_proximal=LOGP_OLD + hidden,
        logp_ref=LOGP_OLD + hidden,
    )
    total, _ = loss(logp, select_tokens(examples, objective), objective=objective, counts=Counts.of(MASK))
    total.backward()
    times = len(LENGTHS) if name == "vanilla" else 1
    # verl's 1e-8 beside the length of a row is the only other difference.
    close = {"rtol": 1e-7, "atol": 1e-9} if name in {"geo_mean", "sapo", "gspo"} else {"rtol": 1e-12, "atol": 1e-14}
    value = torch.tensor(expected["value"], dtype=torch.float64)
    torch.testing.assert_close(times * total.detach(), value, **close)
    gradient = torch.tensor(expected["gradient"], dtype=torch.float64)
    torch.testing.assert_close(times * logp.grad, gradient, **close)


def test_verls_mean_by_a_constant_length_is_larger_by_the_number_of_responses_and_explain_says_so():
    text = LOSSES["vanilla"].explain()
    assert f"/ (N_seq * {PADDED})" in text
    assert "verl's mode of this name does not divide by N_seq: its loss and gradient are N_seq times larger" in text


def spread(rows):
    return torch.where(MASK, rows[:, None], 0.0)


@pytest.mark.parametrize("name", ["opo", "best_minus_second", "remax", "optimal_baseline"])
def test_the_advantages_are_verls(name):
    token_rewards = torch.zeros_like(LOGP)
    token_rewards[torch.arange(len(LENGTHS)), LENGTHS - 1] = REWARDS
    found = {
        "opo": lambda: spread(advantages.opo(REWARDS, GROUPS, LENGTHS)),
        "best_minus_second": lambda: spread(advantages.best_minus_second(REWARDS, GROUPS)),
        "remax": lambda: spread(advantages.remax(REWARDS, torch.full_like(REWARDS, 0.25))),
        # verl was given pi of the sampled token for the vocabulary's sum of pi^2, which it stands for here.
        "optimal_baseline": lambda: advantages.optimal_baseline(token_rewards, GROUPS, logp_old=LOGP_OLD, mask=MASK),
    }[name]()
    expected = torch.tensor(VERL["advantages"][name], dtype=torch.float64)
    # verl puts the advantages of ReMax to every token of the response, as returns from each on: the same here.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
