"""What `VllmSink` has each worker of a vLLM engine do: survey, attach, apply, read back.

Mixed by vLLM into its worker class, as `worker_extension_cls`. Arguments and answers are plain data, never tensors. A
worker answers what went wrong instead of raising it: an exception in one of several workers would leave the answers of
the others in vLLM's queues, and the next call would take them for its own.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rl_refit.digest import digest_regions
from rl_refit.layout import Region
from rl_refit.vllm import cpu_workarounds
from rl_refit.vllm.bank import Bank
from rl_refit.vllm.reload import all_agree, reload_from
from rl_refit.vllm.resident import Resident
from rl_refit.vllm.survey import survey

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["RefitWorker"]

Answer = dict[str, Any]
Method = TypeVar("Method", bound="Callable[..., Answer]")


def _answering(method: Method) -> Method:
    """Whatever `method` raises becomes its answer."""

    @functools.wraps(method)
    def answer(self: RefitWorker, *args: object) -> Answer:
        try:
            return {"rank": self.rank, **method(self, *args)}
        except Exception as error:  # noqa: BLE001  (the driver raises it)
            return {"rank": self.rank, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}

    return cast("Method", answer)


@dataclass(slots=True)
class _Memory:
    """What a worker keeps between two calls."""

    bank: Bank | None = None
    identity: tuple[int, ...] = ()
    resident: Resident | None = None


class RefitWorker:
    """The methods that a worker gets."""

    if TYPE_CHECKING:
        rank: int
        model_runner: Any
        vllm_config: VllmConfig
        reload_weights: Callable[..., None]

    _rl_refit_kept: _Memory | None = None

    @property
    def _rl_refit(self) -> _Memory:
        if self._rl_refit_kept is None:
            self._rl_refit_kept = _Memory()
        return self._rl_refit_kept

    @_answering
    def rl_refit_survey(self, rows: Sequence[Sequence[Any]]) -> Answer:
        """What the engine needs of a source with tensors `rows`: name, dtype, shape. See `rl_refit.vllm.survey`."""
        repaired = cpu_workarounds.needed()
        found = survey(self.vllm_config, rows)
        self._rl_refit.resident = resident = Resident(self.model_runner.get_model(), found.homes)
        return {
            **found.answer,
            "unreadable": resident.unreadable([row[0] for row in rows]),
            "live_ties": resident.ties(),
            "repaired": repaired,
        }

    @_answering
    def rl_refit_attach(self, path: str, identity: Sequence[int], table: Sequence[Sequence[Any]]) -> Answer:
        """Map the driver's bank, and let go of an earlier one."""
        self._rl_refit.bank = None
        self._rl_refit.bank = Bank.attach(path, identity, table)
        self._rl_refit.identity = tuple(identity)
        return {}

    @_answering
    def rl_refit_apply(self, identity: Sequence[int], digest: str) -> Answer:
        """Load the bank into the engine, if what every worker reads there has `digest`; "refused" by all if not."""
        bank = self._rl_refit.bank if self._rl_refit.identity == tuple(identity) else None
        given = bank.digest(bank.whole) if bank is not None else None
        workers = self.vllm_config.parallel_config.world_size
        agreed = all_agree(mine=given is not None and given.hex == digest, workers=workers)
        if bank is None or given is None:
            return {"state": "refused", "error": "another sink has given this worker its bank since this one did"}
        if not agreed:
            return {"state": "refused", "digest": given.hex, "tensors": dict(given.tensors)}
        reload_from(bank.tensors, self.model_runner.get_model(), self.reload_weights)
        return {"state": "applied", "digest": given.hex}

    @_answering
    def rl_refit_read(self, boxes: Sequence[Sequence[Any]] | None) -> Answer:
        """Digests of what the engine's own tensors hold of `boxes`, rows of name, offsets, shape; None for all."""
        resident = self._rl_refit.resident
        if resident is None:
            return {"tensors": {}}
        regions = resident.whole if boxes is None else [Region(name, tuple(at), tuple(n)) for name, at, n in boxes]
        return {"tensors": dict(digest_regions(regions, resident.read).tensors)}
