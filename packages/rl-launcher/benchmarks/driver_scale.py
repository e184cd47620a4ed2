"""What the driver itself takes of a training step at 1, 8 and 64 ranks: peak memory and milliseconds.

The training half of the driver's GRPO loop runs as in a run over Ray: proximal log-probabilities are asked for, the
step is observed for the record, the rows are dealt by data-parallel rank, put into Ray's object store and sent, and all
replies are collected. The ranks are simulated: each is asked by calls of its own through Ray, as a real one, and
answers from a process that holds several ranks, without a model: log-probabilities are the sampler's, and the real loss
is computed on its rows.

    python benchmarks/driver_scale.py [--ranks 1 8 64] [--rows 1024] [--tokens 2048] [--steps 5]

`64/8` are 64 ranks of which 8 share rows, as tensor-parallel ranks do. Memory is relative to the bytes of the batch as
the loss reads it; the last line is JSON with every figure, and whether the bars hold: at 64 ranks, at most 1.25 times
the memory of one rank, and at most 10 ms of the driver's CPU for each further rank.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

from rl_algorithms import grpo
from rl_algorithms.objective import Objective
from rl_algorithms.observation import ObservedPolicy, number_rows
from rl_algorithms.rollouts import Rollouts
from rl_backends.batching.dealing import DealtRows, RowDealing
from rl_launcher.ray.policy import RayPolicy
from rl_launcher.ray.remote_calls import Actor
from rl_launcher.ray.remote_methods import RemoteCall
from rl_launcher.ray.training_worker import POLICY, TrainingWorker
from rl_launcher.ray.worker_failures import Failure, ProcessInfo

VOCABULARY = 32_000
PROMPT_TOKENS = 256
HOSTS = 4
"""Processes that the simulated ranks are spread over."""
MEMORY_BAR, CPU_BAR_MS = 1.25, 10.0


class SimulatedBackend:
    """What a rank's backend is asked, without a model."""

    def __init__(self, dealing: RowDealing) -> None:
        self.dealing, self.version, self.learning_rate = dealing, 0, 1e-6

    def row_dealing(self) -> RowDealing:
        """As a backend's."""
        return self.dealing

    def logp(self, dealt: DealtRows[Any]) -> torch.Tensor:
        """The sampler's."""
        logp: torch.Tensor = dealt.examples.logp_old.clone()
        return logp

    def forward_backward(self, dealt: DealtRows[Any], loss: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """The real loss, microbatch by microbatch; its sums are of this rank's rows alone, and nobody looks at them."""
        totals: dict[str, torch.Tensor] = {}
        _, own = self.dealing.cut_of(dealt)
        for microbatch in own:
            if not microbatch.counted:
                continue
            kind: Any = type(dealt.examples)
            taken = kind(**{each.name: getattr(dealt.examples, each.name)[microbatch.rows] for each in fields(kind)})
            _, sums = loss(taken.logp_old, taken)
            totals = {name: totals.get(name, torch.zeros(())) + value.detach() for name, value in sums.items()}
        return totals

    def optim_step(self) -> float:
        """Count."""
        self.version += 1
        return 1.0

    def metrics(self, *, memory: bool) -> None:
        """There are none."""


class Host:
    """A Ray actor that answers for several ranks."""

    def __init__(self, ranks: dict[int, SimulatedBackend]) -> None:
        torch.set_num_threads(1)
        self._workers = {}
        for rank, backend in ranks.items():
            worker = self._workers[rank] = TrainingWorker.__new__(TrainingWorker)
            worker._rank, worker._models = rank, {POLICY: backend}

    def call(self, rank: int, method: str, call: RemoteCall, *arguments: Any, **options: Any) -> Any:
        """`TrainingWorker.run` of a rank."""
        try:
            return getattr(self._workers[rank], method)(call, *arguments, **options)
        except Exception as error:  # noqa: BLE001 - as `ActorHost` does
            return Failure.of(error)


def make_policy(num_ranks: int, *, sharing: int) -> RayPolicy:
    """A policy of so many ranks, of which `sharing` at a time are given the same rows."""
    groups = num_ranks // sharing
    backends = {
        rank: SimulatedBackend(
            RowDealing(
                rank=rank // sharing,
                num_ranks=groups,
                micro_batch_size=4,
                token_multiple=1,
                vocabulary_size=VOCABULARY,
            )
        )
        for rank in range(num_ranks)
    }
    number = min(HOSTS, num_ranks)
    hosts = [
        ray.remote(Host)
        .options(num_cpus=0)
        .remote({rank: each for rank, each in backends.items() if rank % number == host})
        for host in range(number)
    ]

    def actor(rank: int) -> Actor:
        handle = hosts[rank % number]

        def remote(method: str, *arguments: Any, **options: Any) -> Any:
            return handle.call.remote(rank, method, *arguments, **options)

        who = ProcessInfo(role="trainer", index=rank, node="here", pid=None)
        call = SimpleNamespace(call=SimpleNamespace(remote=remote))
        return Actor(call, who=who, name=f"trainer-{rank}", ip="127.0.0.1", strategy=None)

    config = SimpleNamespace(call_timeout_s=600.0, start_timeout_s=600.0, hang_timeout_s=600.0)
    runtime: Any = SimpleNamespace(config=config, put=ray.put)
    policy = RayPolicy(runtime, [actor(rank) for rank in range(num_ranks)])
    policy.row_dealing()  # the processes have started, and have imported what they need
    return policy


def make_rollouts(*, rows: int, tokens: int) -> Rollouts:
    """Rollouts in groups of 8, with lengths from a quarter of `tokens` to all of it."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(PROMPT_TOKENS + 1, tokens // 4), tokens + 1, (rows,), generator=random)
    places = torch.arange(tokens)
    response = (places >= PROMPT_TOKENS) & (places < lengths[:, None])
    rewards = torch.randint(0, 2, (rows,), generator=random).double()
    token_rewards = torch.zeros(rows, tokens, dtype=torch.float64)
    token_rewards[torch.arange(rows), lengths - 1] = rewards
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=random)
    return Rollouts(
        tokens=torch.where(places < lengths[:, None], ids, 0),
        lengths=lengths,
        response=response,
        logp_old=torch.where(response, -torch.rand(rows, tokens, generator=random), 0.0),
        versions=torch.where(response, 0, -1),
        turns=torch.where(response, 0, -1),
        token_rewards=token_rewards,
        rewards=rewards,
        components=torch.zeros(rows, 0, dtype=torch.float64),
        groups=torch.arange(rows) // 8,
        truncated=lengths == tokens,
        failed=torch.zeros(rows, dtype=torch.bool),
        answers=("",) * rows,
        failures=(None,) * rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one number of ranks."""

    ranks: int
    sharing: int
    """Ranks that are given the same rows."""
    batch_bytes: int
    """Of the tensors that a step is made of."""
    peak_bytes: int
    """The most that the driver's memory grew during steps, mapped parts of Ray's object store included."""
    relative_memory: float
    """The same, divided by the bytes of the batch."""
    wall_ms: float
    """Of a step, the simulated ranks' own work on the same cores included; the median."""
    cpu_ms: float
    """CPU time of the driver's process in a step; the median."""


def memory(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def measure(num_ranks: int, *, sharing: int, rollouts: Rollouts, steps: int) -> Figures:
    """Take steps, and look at this process; the time of the first is not counted."""
    objective = Objective()
    policy = make_policy(num_ranks, sharing=sharing)
    config = grpo.GRPOConfig(max_num_steps=1, objective=objective)
    observed = ObservedPolicy(policy, on_step=lambda _: None)
    walls, cpus, batch_bytes = [], [], 0

    def step(rollouts: Rollouts, number: int) -> int:
        """One pass of the loop from rollouts to new weights; the bytes of what is trained on."""
        observed.logp(grpo.prepare(rollouts, objective))
        examples = number_rows(grpo.prepare(rollouts, objective), rollouts, objective)
        num_bytes = 0
        for part in grpo.minibatches(examples, config, groups=rollouts.groups[examples.rows], seed=number):
            grpo.step(observed, part, objective)
            num_bytes += sum(getattr(part, each.name).nbytes for each in fields(part))
        return num_bytes

    # A few short rows first: pools of threads, imports and connections exist then, and the batch's memory is not there.
    for number in range(2):
        step(make_rollouts(rows=max(8, num_ranks), tokens=PROMPT_TOKENS + 2), number)
    before = memory("VmRSS")
    for number in range(steps + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        batch_bytes = step(rollouts, number)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    peak = memory("VmHWM") - before
    return Figures(
        ranks=num_ranks,
        sharing=sharing,
        batch_bytes=batch_bytes,
        peak_bytes=peak,
        relative_memory=round(peak / batch_bytes, 3),
        wall_ms=round(1000 * statistics.median(walls[1:]), 1),
        cpu_ms=round(1000 * statistics.median(cpus[1:]), 1),
    )


def main() -> None:
    """Measure each number of ranks in a process of its own; print a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--ranks", nargs="+", default=["1", "8", "64", "64/8"], help="ranks, or ranks/ranks that share rows"
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest row")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", action="store_true", help="in this process: print the JSON of one measurement")
    chosen = parser.parse_args()
    if chosen.only:
        torch.set_num_threads(1)
        rollouts = make_rollouts(rows=chosen.rows, tokens=chosen.tokens)
        ranks, _, sharing = chosen.ranks[0].partition("/")
        ray.init("local", num_cpus=HOSTS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        try:
            found = measure(int(ranks), sharing=int(sharing or 1), rollouts=rollouts, steps=chosen.steps)
        finally:
            ray.shutdown()
        print(json.dumps(asdict(found)))
        return
    runs: list[Figures] = []
    for text in chosen.ranks:
        sizes = [f"--{name}={getattr(chosen, name)}" for name in ("rows", "tokens", "steps")]
        command = [sys.executable, __file__, "--only", *sizes, "--ranks", text]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        each = Figures(**json.loads(done.stdout.splitlines()[-1]))
        runs.append(each)
        print(
            f"{text:>6} ranks  {each.wall_ms:8.1f} ms a step  {each.cpu_ms:8.1f} ms of CPU  "
            f"{each.peak_bytes / 2**20:7.1f} MiB at the peak, "
            f"{each.relative_memory:.2f} of the batch's {each.batch_bytes / 2**20:.1f} MiB",
            flush=True,
        )
    one, most = min(runs, key=lambda each: each.ranks), max(runs, key=lambda each: (each.ranks, -each.sharing))
    holds = most.relative_memory <= MEMORY_BAR * one.relative_memory and most.cpu_ms - one.cpu_ms <= CPU_BAR_MS * (
        most.ranks - one.ranks
    )
    versions = {name: version(name) for name in ("torch", "ray")}
    print(
        json.dumps(
            {"rows": chosen.rows, "tokens": chosen.tokens, **versions, "runs": list(map(asdict, runs)), "holds": holds}
        )
    )


if __name__ == "__main__":
    main()
