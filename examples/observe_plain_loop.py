"""rl-observe in a plain torch loop: figures, phases, a report of one HTML file. No other package of ours is needed.

Inside the context the run is watched too: a loss that is NaN or infinite, a full disk, and Ctrl-C are recorded under
their names, and the report is written in any case.
"""

import tempfile

import torch
from torch import nn

from rl_observe import RunLog

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run_dir = f"{tempfile.mkdtemp()}/run"

with RunLog(run_dir, recipe={"lr": 1e-2, "batch_size": 64}) as log:
    for _ in range(200):
        with log.phase("data"):
            inputs = torch.rand(64, 2)
            wanted = inputs.prod(dim=1, keepdim=True)
        with log.phase("train"):
            loss = (model(inputs) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        log.step(loss=loss.item(), grad_norm=norm.item())
    log.summary["final_loss"] = loss.item()

print(f"loss {loss.item():.5f}; open {run_dir}/report.html")
