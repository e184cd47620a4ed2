"""A claim about saved adapters: what a power cut could take back is on the disk before the folder has its name."""

import os
from pathlib import Path

from rl_backends.config import LoraConfig
from rl_backends.lora.files import save_adapter
from rl_backends.lora.inject import add_lora


def test_an_adapter_is_on_disk_before_its_folder_has_its_name(world, tmp_path, monkeypatch):
    synced = []

    def spy(descriptor, sync=os.fsync):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        sync(descriptor)

    model = add_lora(world.make_model("Llama"), LoraConfig(rank=2))
    monkeypatch.setattr(os, "fsync", spy)
    save_adapter(model, tmp_path / "adapter", base_model_name="base")
    files = {f".adapter.unfinished/{path.name}" for path in (tmp_path / "adapter").iterdir()}
    assert set(synced) == {*files, ".adapter.unfinished", "."}
    assert synced[-2:] == [".adapter.unfinished", "."]
