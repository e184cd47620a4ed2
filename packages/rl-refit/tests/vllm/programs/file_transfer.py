"""A back-end of vLLM's weight transfer that needs no GPU: a file of safetensors for each update."""

import dataclasses
from pathlib import Path
from typing import ClassVar

from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_refit.vllm.worker import RefitWorker

BACKEND = "file"


@dataclasses.dataclass
class Nothing(WeightTransferInitInfo):
    pass


@dataclasses.dataclass
class File(WeightTransferUpdateInfo):
    path: str


@dataclasses.dataclass
class Folder(TrainerInitInfo):
    backend: ClassVar[str] = BACKEND

    folder: Path


class FileEngine(WeightTransferEngine[Nothing, File]):
    """The worker's end, with the lifecycle that vLLM's engines for checkpoints have."""

    init_info_cls, update_info_cls = Nothing, File

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info):  # vLLM's own waits for an accelerator
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        from rl_refit.vllm import reload

        finalize_layerwise_reload(self.model, self.model_config)
        reload.repack_vocabulary(self.model)

    def shutdown(self):
        pass


class FileTrainer(TrainerWeightTransferEngine[Folder]):
    """The trainer's end; `wire` may change what is under way."""

    init_info_cls = Folder

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made.path, made.wire = Path(init_info.folder) / "update.safetensors", lambda tensors: None
        client.init_weight_transfer_engine({})
        return made

    def send_weights(self, version=None):
        tensors = {name: tensor.clone() for name, tensor in self.source}
        self.wire(tensors)
        save_file(tensors, self.path)
        self.client.start_weight_update()
        self.client.update_weights({"path": str(self.path)})
        self.client.finish_weight_update(version)


class FileWorker(RefitWorker):
    """A worker whose process has imported this module, and so has the back-end."""


class Client:
    """vLLM's four calls, of an `LLM` in this process."""

    def __init__(self, llm):
        self.llm = llm

    def init_weight_transfer_engine(self, init_info):
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self):
        self.llm.start_weight_update()

    def update_weights(self, update_info):
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self.llm.finish_weight_update(weight_version)
        assert self.llm.reset_prefix_cache()


WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, FileTrainer)
