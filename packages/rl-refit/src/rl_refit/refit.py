"""The transaction: prepare, transfer, verify, commit; or abort, with the old weights as they were.

    PREPARE    the manifests agree, every tensor is covered, the version is new     planned once, checked every time
    TRANSFER   bucket after bucket into the sink's stage                            deadline looked at after each
    VERIFY     digest of each staged tensor == digest of what the source gave
    COMMIT     the sink makes the staged weights the weights

Knows neither models nor engines: any `WeightSource` and `WeightSink` of one rank each, in this process. Not safe to
call from two threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from rl_refit.buckets import ALIGNMENT, DEFAULT_BUCKET_BYTES
from rl_refit.contracts import Coverage, WeightSink, WeightSource
from rl_refit.digest import Digest
from rl_refit.errors import DigestError, RefitError
from rl_refit.manifest import Manifest
from rl_refit.plan import RefitPlan, plan_refit
from rl_refit.progress import Progress
from rl_refit.report import RefitReport
from rl_refit.transfer import InProcessTransfer

__all__ = ["Refit", "RefitConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitConfig:
    """What a refit may choose. `Refit` takes the same names."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Bytes of a slot of the ring. Smaller takes less memory and looks at the deadline more often; on a CPU, much
    larger falls out of the cache and is slower."""

    buckets: int = 2
    """Slots of the ring; `buckets * bucket_bytes` is all the memory that a refit takes beside the sink's stage."""

    deadline_s: float = 600.0
    """Seconds that each phase may take before the refit is aborted. It is looked at between buckets and after prepare
    and verify; a commit that has begun is let finish."""

    verify: bool = True
    """False leaves out the digests, and with them the proof that the sink holds what the source gave."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < ALIGNMENT or self.bucket_bytes % ALIGNMENT:
            raise ValueError(f"bucket_bytes must be a positive multiple of {ALIGNMENT}; got {self.bucket_bytes}")
        if self.buckets < 1:
            raise ValueError(f"buckets must be at least 1; got buckets={self.buckets}")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be positive; got deadline_s={self.deadline_s}")


_DEFAULTS = RefitConfig()


@final
class Refit:
    """Brings the weights of `source` into `sink`, all or nothing, whenever it is called.

    Args:
        source: Where fresh weights come from, whole on one rank.
        sink: Where they go.
        bucket_bytes: See `RefitConfig`, as for the arguments that follow.
        buckets: Slots of the ring.
        deadline_s: Seconds a phase may take.
        verify: Whether to compare digests before the commit.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        *,
        bucket_bytes: int = _DEFAULTS.bucket_bytes,
        buckets: int = _DEFAULTS.buckets,
        deadline_s: float = _DEFAULTS.deadline_s,
        verify: bool = _DEFAULTS.verify,
    ) -> None:
        self._config = RefitConfig(bucket_bytes=bucket_bytes, buckets=buckets, deadline_s=deadline_s, verify=verify)
        self._source = source
        self._sink = sink
        self._plan: RefitPlan | None = None
        self._transfer: InProcessTransfer | None = None

    @property
    def plan(self) -> RefitPlan:
        """What a call will move. Made at the first look or the first call; the sink allocates its stage then.

        Raises:
            CoverageError: Source and sink do not hold the same tensors.
            RefitError: One of them spans several ranks, or cannot take part.
        """
        if self._plan is None:
            try:
                manifest = self._source.manifest()
                self._agree(manifest, self._sink.prepare(manifest))
            finally:
                self._sink.abort()
        assert self._plan is not None
        return self._plan

    def explain(self) -> str:
        """The plan as text, with the buckets of this refit."""
        return self.plan.explain(bucket_bytes=self._config.bucket_bytes)

    def __call__(self, version: int) -> RefitReport:
        """Bring the source's present weights into the sink as `version`, the number of optimizer steps they have seen.

        Whatever is raised, the sink has been aborted before: up to and including verify it keeps its old weights, bit
        for bit, and its old version. What a source or sink raises comes through as it is, with a note of phase, bucket
        and tensor.

        Raises:
            RefitError: `version` is no integer ≥ 0 or not newer than the sink's, or a side broke its promises.
            CoverageError: The two sides do not hold the same tensors.
            DeadlineError: A phase took longer than `deadline_s`.
            DigestError: What was staged is not what the source gave.
        """
        progress = Progress(deadline_s=self._config.deadline_s)
        try:
            return self._run(version, progress)
        except BaseException as error:
            self._sink.abort()
            _annotate(error, version, progress)
            raise

    def _run(self, version: int, progress: Progress) -> RefitReport:
        with progress.phase("prepare"):
            transfer = self._prepare(version)
            progress.check_deadline()
        with progress.phase("transfer"):
            sent = transfer.run(self._source, self._sink, progress, verify=self._config.verify)
        with progress.phase("verify"):
            if self._config.verify:
                _compare(sent, self._sink.digest())
            progress.check_deadline()
        with progress.phase("commit"):
            self._sink.commit(version)
        plan = self.plan
        return RefitReport(
            version=version,
            tensors=sum(meta.tied_to is None for meta in plan.sink.tensors),
            bytes=sum(route.nbytes for route in plan.routes),
            buckets=transfer.num_buckets,
            seconds=progress.seconds,
            digest=sent.hex if self._config.verify else None,
            manifest_hash=plan.source.hash(),
            extra_bytes=transfer.ring_bytes,
        )

    def _prepare(self, version: int) -> InProcessTransfer:
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise RefitError(f"a version is a number of optimizer steps, an int ≥ 0; got version={version!r}")
        manifest = self._source.manifest()
        coverage = self._sink.prepare(manifest)
        if coverage.version is not None and version <= coverage.version:
            raise RefitError(
                f"version {version} is not newer than the sink's {coverage.version}; "
                f"a version is the number of optimizer steps that the weights have seen, never a count of calls"
            )
        return self._agree(manifest, coverage)

    def _agree(self, manifest: Manifest, coverage: Coverage) -> InProcessTransfer:
        """Plan the first time; afterwards hold both sides to what was planned."""
        if coverage.manifest_hash != manifest.hash():
            raise RefitError(
                f"the sides disagree on the manifest: the source's hash is {manifest.hash()}, "
                f"the sink answers {coverage.manifest_hash}"
            )
        if self._plan is None or self._transfer is None:
            plan = plan_refit(manifest, coverage.sink)
            self._transfer = InProcessTransfer(plan, bucket_bytes=self._config.bucket_bytes, slots=self._config.buckets)
            self._plan = plan
        _require_unchanged("source", planned=self._plan.source, now=manifest)
        _require_unchanged("sink", planned=self._plan.sink, now=coverage.sink)
        return self._transfer


def _require_unchanged(side: str, *, planned: Manifest, now: Manifest) -> None:
    if planned.hash() == now.hash():
        return
    before, after = set(planned.tensors), set(now.tensors)
    changed = sorted({meta.name for meta in before ^ after}) or ["their order"]
    raise RefitError(
        f"the manifest of the {side} is not the one that was planned: "
        f"{planned.hash()[:12]} then, {now.hash()[:12]} now; changed: {', '.join(changed)}; make a new Refit"
    )


def _compare(sent: Digest, staged: Digest) -> None:
    differing = sent.differing(staged)
    if differing:
        lines = (f"\n  {name}: {sent.tensors.get(name)} sent, {staged.tensors.get(name)} staged" for name in differing)
        raise DigestError(
            f"{len(differing)} tensors are not staged as they were sent:{''.join(lines)}", tensors=differing
        )


def _annotate(error: BaseException, version: int, progress: Progress) -> None:
    if isinstance(error, RefitError):
        error.phase = error.phase or progress.phase_name
        error.tensor = error.tensor or progress.tensor
        error.bucket = progress.bucket if error.bucket is None else error.bucket
    outcome = "the commit had begun, so ask the sink whether it is poisoned"
    if progress.phase_name != "commit":
        outcome = "the old weights and the old version are intact"
    error.add_note(f"refit to version {version!r} aborted in {progress.where()}: {outcome}")
