"""Which training backend a policy gets: Megatron where it is enabled, otherwise DTensor.

Neither backend is imported until one is made, so that only a policy that Megatron trains needs megatron-core.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from rl_backends.backend import Backend
from rl_backends.config import LoraConfig
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.megatron.config import MegatronConfig


@runtime_checkable
class BackendConfigs(Protocol):
    """What a selection is made from: whatever holds both configurations, such as a recipe's `policy`."""

    @property
    def dtensor_cfg(self) -> DTensorConfig:
        """Of the DTensor backend, enabled unless it is switched off."""

    @property
    def megatron_cfg(self) -> MegatronConfig:
        """Of the Megatron backend, off unless it is enabled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSelection:
    """The backend that was chosen, and why."""

    backend: Literal["dtensor", "megatron"]
    reason: str
    """Why that one, and which settings of the other have no effect."""
    config: DTensorConfig | MegatronConfig
    unused: tuple[str, ...] = ()
    """Settings of the other that differ from their defaults, as `dtensor_cfg.device='cuda'`."""

    @property
    def is_plain(self) -> bool:
        """True if the default backend was selected and no setting is ignored, so that nothing needs to be reported."""
        return self.backend == "dtensor" and not self.unused

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters that are trained in the place of the weights; None where the weights are."""
        return self.config.lora_cfg

    def without_adapters(self) -> "BackendSelection":
        """The same backend for a model that gets none, such as a teacher."""
        return replace(self, config=replace(self.config, lora_cfg=None))

    def require_installed(self) -> None:
        """Refuse at once what `make` would refuse after a model was loaded.

        Raises:
            MissingDependencyError: Megatron was chosen, and megatron-core is absent, too old or too new.
            ModelError: adapters were asked for, and peft is absent.
        """
        if self.backend == "megatron":
            from rl_backends.megatron.installed import require_megatron

            require_megatron()
        if self.adapters is not None:
            from rl_backends.lora.inject import require_peft

            require_peft()

    def make(self, model: nn.Module, *, seed: int = 0, **options: Any) -> Backend:
        """The backend over `model`, with its weights; options and errors are those of its constructor.

        seed: of the first values of adapters, where there are any: nothing else begins at random.
        """
        if self.adapters is not None:
            options["seed"] = seed
        made: Backend = self._class()(model, self.config, **options)
        return made

    def from_pretrained(self, model_name: str, **options: Any) -> Backend:
        """The backend over a folder or hub id; options and errors are those of its `from_pretrained`."""
        made: Backend = self._class().from_pretrained(model_name, self.config, **options)
        return made

    def _class(self) -> Any:
        self.require_installed()
        if self.backend == "megatron":
            from rl_backends.megatron.backend import MegatronBackend

            return MegatronBackend
        from rl_backends.dtensor.backend import DTensorBackend

        return DTensorBackend


def select_backend(configs: BackendConfigs) -> BackendSelection:
    """Choose by `megatron_cfg.enabled`, which takes precedence, and `dtensor_cfg.enabled`.

    Raises:
        ValueError: neither is enabled; or Megatron is, and adapters were asked for of the other alone.
    """
    dtensor, megatron = configs.dtensor_cfg, configs.megatron_cfg
    backend: Literal["dtensor", "megatron"] = "megatron" if megatron.enabled else "dtensor"
    config: DTensorConfig | MegatronConfig
    other: DTensorConfig | MegatronConfig
    if megatron.enabled:
        if dtensor.lora_cfg is not None and megatron.lora_cfg is None:
            raise ValueError(
                "megatron_cfg.enabled=true and dtensor_cfg.lora_cfg: Megatron would train all weights; set "
                "megatron_cfg.lora_cfg for adapters on Megatron, or dtensor_cfg.lora_cfg to null"
            )
        alone = "megatron_cfg.enabled is true, and dtensor_cfg.enabled is false"
        both = "megatron_cfg.enabled is true, and takes precedence over dtensor_cfg.enabled, which is true too"
        reason, config, name, other = both if dtensor.enabled else alone, megatron, "dtensor_cfg", dtensor
    elif dtensor.enabled:
        reason = "dtensor_cfg.enabled is true, and megatron_cfg.enabled is false"
        config, name, other = dtensor, "megatron_cfg", megatron
    else:
        raise ValueError(
            "dtensor_cfg.enabled and megatron_cfg.enabled are both false, which leaves nothing to train with; set one "
            "of them to true"
        )
    default = type(other)()
    unused = tuple(
        f"{name}.{field.name}={getattr(other, field.name)!r}"
        for field in fields(other)
        if field.name != "enabled" and getattr(other, field.name) != getattr(default, field.name)
    )
    effect = f"; of no effect: {', '.join(unused)}" if unused else ""
    return BackendSelection(backend=backend, reason=reason + effect, config=config, unused=unused)
