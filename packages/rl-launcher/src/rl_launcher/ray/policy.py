"""The policy over all ranks of a Ray cluster.

It knows their methods and no engine. It may be called from several threads, one call at a time.

Only what a function makes is made whole, here and once, and written where all ranks find it.
"""

import contextlib
import itertools
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_backends import OffloadReport, OptimizerConfig, StepMetrics, check_vocabulary, load_tokenizer, open_model
from rl_launcher.checkpoints.disk import SharedFolder
from rl_launcher.load_model import NamedModel, load_model
from rl_launcher.ray.cluster import Place, RayRuntime
from rl_launcher.ray.failures import RemoteError
from rl_launcher.ray.placement import Placement
from rl_launcher.ray.refit_rendezvous import RefitMeeting
from rl_launcher.ray.remote_calls import Actor, Pending, gather
from rl_launcher.ray.training_worker import POLICY, Reply, TrainerSpec, TrainingWorker, pack
from rl_launcher.user_code import NO_OBJECTS, Objects, is_import_string
from rl_parallel_plans import TopKLogp
from rl_refit import RefitReport

__all__ = ["Outline", "RayModel", "RayPolicy", "outline_of", "start_trainers"]

REFIT_GRACE_S = 90.0
"""After one rank's refit has failed the others' end, too, when they learn of it: at the latest by its silence."""


class RayModel:
    """A model of the ranks that nothing trains: a reference, or a teacher."""

    def __init__(self, policy: "RayPolicy", number: int) -> None:
        self._policy, self.number = policy, number

    def logp(self, examples: Any) -> Tensor:
        """As the policy's, at the policy's temperature for a reference."""
        logp: Tensor = self._policy.ask("logp", self.number, examples)
        return logp

    def topk_logits(self, examples: Any, k: int) -> TopKLogp:
        """The `k` most probable words in each trainable token's place."""
        read: TopKLogp = self._policy.ask("topk_logits", self.number, examples, k)
        return read


class RayPolicy:
    """A `TrainedPolicy` over actors, each of which holds a rank.

    Whatever one rank raises is raised here, as an instance of the same class, with the rank, its node, its process and
    its traceback. A rank that dies or does not answer ends all of them: nobody is left waiting in a collective.
    """

    def __init__(self, runtime: RayRuntime, actors: Sequence[Actor]) -> None:
        self._runtime, self._actors = runtime, tuple(actors)
        self._numbers = itertools.count(POLICY + 1)
        self._forgotten: list[int] = []
        self._version, self._set_version = 0, False
        self._learning_rate: float | None = None
        self._unsettled = False
        self._cut_short: list[Pending] = []
        self._ended: RemoteError | None = None
        self._closed = False
        self.lock = threading.RLock()
        """Held while a call is under way."""

    @property
    def num_ranks(self) -> int:
        """Of the trainer."""
        return len(self._actors)

    # -- TrainedPolicy ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen; while ranks are still at a call that was cut short, before it."""
        if self._unsettled and self._ended is None and not self._closed and not self._at_work():
            self._run("nothing")
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version, self._set_version = version, True

    @property
    def learning_rate(self) -> float:
        """Of the next step.

        Raises:
            RuntimeError: `start_training` was not called.
        """
        if self._learning_rate is None:
            raise RuntimeError("there is no optimizer yet; call start_training(optimizer, num_steps=...) first")
        return self._learning_rate

    def start_training(self, optimizer: OptimizerConfig, *, num_steps: int, temperature: float = 1.0) -> None:
        """Begin a stage with a fresh optimizer."""
        self._run("start_training", optimizer, {"num_steps": num_steps, "temperature": temperature})

    def logp(self, examples: Any) -> Tensor:
        """Log-probability of each trainable token given those before it; 0 elsewhere. [B, T]."""
        logp: Tensor = self.ask("logp", POLICY, examples)
        return logp

    def entropy(self, examples: Any) -> Tensor:
        """Entropy in nats of the distribution of each trainable token; 0 elsewhere. [B, T]."""
        entropy: Tensor = self.ask("entropy", POLICY, examples)
        return entropy

    def topk_logits(self, examples: Any, k: int) -> TopKLogp:
        """The `k` most probable words in each trainable token's place. [B, T, k]."""
        read: TopKLogp = self.ask("topk_logits", POLICY, examples, k)
        return read

    def forward_backward(self, examples: Any, loss: Any, *, output: Any = "logp") -> dict[str, Tensor]:
        """Accumulate the gradient over all rows, each on one rank; return the sums over all of them."""
        sums: dict[str, Tensor] = self._run("forward_backward", self._runtime.put(pack(examples)), loss, output)
        return sums

    def optim_step(self) -> float:
        """Clip, update, clear the gradient; return its norm before clipping."""
        norm: float = self._run("optim_step")
        return norm

    def metrics(self) -> StepMetrics | None:
        """Tokens, seconds, balance and memory of the last step."""
        metrics: StepMetrics | None = self._run("metrics")
        return metrics

    def freeze_reference(self, **options: Any) -> RayModel:
        """The policy as it is now, frozen, on the ranks; its memory is given back after nobody holds it here."""
        return self._model("freeze_reference", options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder that all ranks see, whole or not at all."""
        self._run("save_pretrained", _for_all(folder))

    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None:
        """Write the adapters in PEFT's format into a folder that all ranks see, whole or not at all."""
        self._run("save_adapter", _for_all(folder), base_model_name)

    def save_checkpoint(self, folder: str | Path, *, weights: bool = True, **options: Any) -> None:
        """Write optimizer, schedule and weights into a folder that all ranks see; whole or not at all."""
        self._run("save_checkpoint", _for_all(folder), {"weights": weights, **options})

    def load_checkpoint(self, folder: str | Path, *, weights: bool = True, **options: Any) -> Any:
        """Go on from what `save_checkpoint` wrote, on any number of ranks."""
        return self._run("load_checkpoint", _for_all(folder), {"weights": weights, **options})

    def explain(self) -> str:
        """How it is sharded, and why, as rank 0 says."""
        explanation: str = self._run("explain")
        return explanation

    def reached(self, stage: str, step: int) -> None:
        """Tell the ranks how far a stage is: each records the steps that it was asked to record."""
        self._all(lambda actor: actor.submit("reached", stage, step))

    def sees(self, path: str, token: str) -> dict[str, bool]:
        """Which rank sees a file that says `token`."""
        return _who_sees(self._actors, path, token, timeout_s=self._runtime.config.call_timeout_s)

    def close(self) -> None:
        """End the ranks. A second time does nothing."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            if self._ended is None and not self._at_work():
                # All at once: some of what they leave, they leave together.
                pendings = [actor.submit("close") for actor in self._actors]
                with contextlib.suppress(RemoteError):  # they are ended in any case
                    gather(pendings, timeout_s=10.0, stacks_s=0.0)
            for actor in self._actors:
                actor.kill()

    # -- Others' models ---------------------------------------------------------------------------------------------

    def load_teacher(self, model_name: str, *, training: Mapping[str, Any], **options: Any) -> RayModel:
        """Another model, sharded as the policy is.

        Args:
            model_name: a folder that all ranks see, or a hub id.
            training: arguments of `start_training`, which sets the temperature.
            options: of `from_pretrained`.
        """
        number = next(self._numbers)
        self._all(
            lambda actor: actor.submit("load_teacher", number, model_name, training=training, options=options),
            timeout_s=self._runtime.config.start_timeout_s,
        )
        return RayModel(self, number)

    def ask(self, method: str, number: int, examples: Any, *more: Any) -> Any:
        """Read something of all rows by one of the ranks' models."""
        return self._run(method, number, self._runtime.put(pack(examples)), *more)

    # -- Engines ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a call is under way in any thread."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return False
        return True

    def make_refit(self, meeting: RefitMeeting) -> None:
        """Have all ranks take part in the refits of `meeting`; returns when the engines have come, too.

        Raises:
            RemoteError: a rank could not.
        """
        self._all(lambda actor: actor.submit("make_refit", meeting, actor.ip), grace_s=REFIT_GRACE_S)

    def dtypes(self) -> dict[str, str]:
        """In which dtype each weight is sent."""
        found: list[dict[str, str]] = self._all(lambda actor: actor.submit("dtypes"))
        return {name: dtype for each in found for name, dtype in each.items()}

    def refit(self, version: int) -> RefitReport:
        """Send the weights as of `version` to the engines, which are receiving; the leader's report.

        Raises:
            RemoteError: also an instance of the `RefitError` that it was; then the ranks can be called again.
        """
        reports: list[Any] = self._all(lambda actor: actor.submit("refit", version), grace_s=REFIT_GRACE_S)
        report: RefitReport = reports[0]
        return report

    def explain_refit(self) -> str:
        """What each refit moves, as rank 0 says."""
        words: list[str] = self._all(lambda actor: actor.submit("explain_refit"))
        return words[0]

    def offload(self, *, parts: Collection[str] | None = None) -> list[OffloadReport]:
        """Give the devices' memory away, of all parts or some; by rank what it gave."""
        options = {} if parts is None else {"parts": tuple(parts)}
        reports: list[OffloadReport] = self._all(lambda actor: actor.submit("offload", options))
        return reports

    def onload(self, *, parts: Collection[str] | None = None) -> list[OffloadReport]:
        """Take it back; by rank."""
        options = {} if parts is None else {"parts": tuple(parts)}
        reports: list[OffloadReport] = self._all(lambda actor: actor.submit("onload", options))
        return reports

    # -- Within -------------------------------------------------------------------------------------------------------

    def _model(self, method: str, options: Mapping[str, Any]) -> RayModel:
        number = next(self._numbers)
        self._run(method, number, options)
        model = RayModel(self, number)
        # Told to the ranks with the next call: a garbage collector calls nobody.
        weakref.finalize(model, self._forgotten.append, number)
        return model

    def _run(self, method: str, *arguments: Any) -> Any:
        """Call a `_do_` method of all ranks; what rank 0 returns."""
        with self.lock:
            version, forgotten = self._version if self._set_version else None, tuple(self._forgotten)
            replies: list[Reply] = self._all(
                lambda actor: actor.submit("run", method, *arguments, version=version, forgotten=forgotten), name=method
            )
            self._set_version = False
            del self._forgotten[: len(forgotten)]
            first = replies[0]
            self._version, self._learning_rate, self._unsettled = first.version, first.learning_rate, False
            return first.value

    def _all(
        self,
        submit: Callable[[Actor], Pending],
        *,
        name: str | None = None,
        timeout_s: float | None = None,
        grace_s: float = 10.0,
    ) -> list[Any]:
        """Have all ranks do something, and wait; by rank what they return."""
        with self.lock:
            if self._ended is not None:
                raise self._ended
            if self._closed:
                raise RuntimeError("the policy was closed")
            limit = self._runtime.config.call_timeout_s if timeout_s is None else timeout_s
            pendings: list[Pending] = []
            try:
                for actor in self._actors:
                    pendings.append(submit(actor))
                    pendings[-1].call = name or pendings[-1].call
                return gather(pendings, timeout_s=limit, grace_s=grace_s)
            except BaseException as error:
                # A call that failed or was interrupted here may have moved the version on there.
                self._unsettled, self._cut_short = True, pendings
                if isinstance(error, RemoteError) and not error.everyone_answered:
                    self._end(error)
                raise

    def _at_work(self) -> bool:
        """Whether ranks have not ended a call that was cut short: one may stand still, and would answer nobody."""
        return self._unsettled and not all(pending.done() for pending in self._cut_short)

    def _end(self, error: RemoteError) -> None:
        """One is lost, and the others wait for it: end them."""
        self._ended = error
        for actor in self._actors:
            actor.kill()


def start_trainers(runtime: RayRuntime, placement: Placement, spec: TrainerSpec) -> RayPolicy:
    """Start every rank, and have all of them load the model together.

    Raises:
        ClusterError: a process did not come up.
        Refusal: a rank does not see the run directory, which the checkpoints go to.
        RemoteError: a rank failed or died while it loaded, or was too slow; also an instance of what it raised.
    """
    timeout_s = runtime.config.start_timeout_s
    places: list[Place] = [("trainer", place.rank, place.node, (place.slot,)) for place in placement.ranks]
    actors = runtime.start_actors(places, sees="all")
    gather(
        [
            actor.submit_make(TrainingWorker, spec, rank=place.rank, local_rank=place.slot)
            for actor, place in zip(actors, placement.ranks, strict=True)
        ],
        timeout_s=timeout_s,
    )
    with SharedFolder(runtime.run_dir) as probe:
        probe.require(_who_sees(actors, probe.path, probe.token, timeout_s=timeout_s))
    first = actors[0]
    port = first.call("host", first.ip, timeout_s=timeout_s)
    loading = [actor.submit("load", (first.ip, port)) for actor in actors]
    for pending in loading:
        pending.call, pending.key = "load", "cluster.start_timeout_s"
    gather(loading, timeout_s=timeout_s)
    return RayPolicy(runtime, actors)


def _who_sees(actors: Sequence[Actor], path: str, token: str, *, timeout_s: float) -> dict[str, bool]:
    seen = gather([actor.submit("sees", path, token) for actor in actors], timeout_s=timeout_s)
    return {str(actor.who): each for actor, each in zip(actors, seen, strict=True)}


def _for_all(folder: str | Path) -> str:
    """The same path for processes that may work elsewhere."""
    return str(Path(folder).absolute())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Of one model."""

    name: str
    """Under which the ranks load it: a folder, or a hub id."""

    revision: str | None
    """Of a hub id."""

    model: Any
    """With its configurations; its weights may be on the meta device."""

    tokenizer: Any


def outline_of(
    named: NamedModel,
    *,
    seed: int,
    key: str,
    padded_vocabulary: bool,
    folder: Path,
    objects: Objects = NO_OBJECTS,
) -> Outline:
    """Look at the model that a recipe names under `key`.

    Args:
        named: the recipe's section.
        seed: of the weights of a model that a function makes.
        key: of the recipe, for errors.
        padded_vocabulary: accept more embeddings than tokens.
        folder: where a model that a function makes, or that is given as an object, is written for the ranks to read;
            what an earlier start left there is replaced.
        objects: a model and a tokenizer that were given in Python.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer is of another vocabulary.
    """
    model: Any
    if objects.model is not None or is_import_string(named.model_name):
        model, tokenizer = load_model(named, seed=seed, key=key, padded_vocabulary=padded_vocabulary, objects=objects)
        _write(model, tokenizer, folder)
        return Outline(name=str(folder.absolute()), revision=None, model=model, tokenizer=tokenizer)
    origin, trust = named.revision, named.trust_remote_code
    tokenizer = objects.tokenizer
    if tokenizer is None:
        tokenizer = load_tokenizer(named.model_name, revision=origin, trust_remote_code=trust)
    model = open_model(named.model_name, revision=origin, trust_remote_code=trust).skeleton()
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=padded_vocabulary,
    )
    path = Path(named.model_name).expanduser()
    name = str(path.absolute()) if path.is_dir() else named.model_name
    return Outline(name=name, revision=named.revision, model=model, tokenizer=tokenizer)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
