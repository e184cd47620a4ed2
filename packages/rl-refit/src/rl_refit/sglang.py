"""A server of SGLang as the sink of weights: `pip install rl-refit[files]`.

The new weights are staged in this process's memory and verified; before the parties decide, they are written as a
checkpoint folder that this process and the server both see, and read back. The commit pauses the server, has it load
that folder (`POST /update_weights_from_disk`, with the version as its `weight_version`), asks it which version it has,
and lets it go on. Nothing is pickled, and no GPU is needed on this side.

SGLang's own quicker ways, `/update_weights_from_tensor` and `/update_weights_from_distributed`, take pickled tensors or
a process group of NCCL, and write into the weights that serve: a refit that fails there has torn them.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final
from urllib.parse import urlsplit

from rl_refit.digest import digest_tensor
from rl_refit.errors import DigestError, PoisonedError, RefitError
from rl_refit.staged import StagedSink, empty_like

__all__ = ["SglangSink"]

ONE_FILE = "model.safetensors"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
"""Endings of files that do not go with a version: they hold other weights, or say where these are."""
ASK_S = 30.0
"""Seconds for an answer that takes the server no work."""


@final
class SglangSink(StagedSink):
    """The weights of a server of SGLang. A `WeightSink` of one rank; several servers are several ranks.

    They are staged as a whole copy in this process's memory, and a second one while that is written.

    Args:
        url: Of the server, such as "http://127.0.0.1:30000".
        like: The checkpoint folder that the server was started with, or one like it. Every refit brings the tensors of
            its safetensors files, by these names, shapes and dtypes; its other files (configuration, tokenizer) go with
            each version.
        folder: Where versions are written, those of each server in a folder of its own, by a path that is the server's
            too. The committed version stays there, since SGLang goes back to it where it cannot load the next one; so
            twice the weights lie there during a refit.
        requests: What becomes of requests that the server is answering: "retract" computes what they have so far anew
            under the new weights and goes on, "abort" ends them. (SGLang's "in_place" keeps caches of the old weights.)
        api_key: Of the server, its `--admin-api-key` where it has one.
        timeout_s: Seconds that the server may take to load a version.

    Raises:
        RefitError: `like` is no checkpoint of safetensors files.
    """

    def __init__(
        self,
        url: str,
        *,
        like: Path | str,
        folder: Path | str,
        requests: Literal["retract", "abort"] = "retract",
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if requests not in {"retract", "abort"}:
            raise ValueError(f'requests must be "retract" or "abort"; got requests={requests!r}')
        self._server = _Server(url, api_key=api_key)
        self._like, self._folder = Path(like), Path(folder).absolute() / self._server.name
        self._requests, self._timeout_s = requests, timeout_s
        super().__init__(empty_like(self._like), engine=self._server.url)
        self._written: Path | None = None
        """The folder of the version that waits for its commit."""
        self._told: list[Path] = []
        """Folders that the server was told to load: it may have any since the last commit, or go back to that one."""

    def check(self) -> None:
        """Pass if the server has the weights that were committed: asks it, since it may have been started anew.

        Raises:
            PoisonedError: A commit failed, or the server has another version.
            RefitError: The server does not answer.
        """
        super().check()
        if self.version is not None and (label := self._label()) != str(self.version):
            raise PoisonedError(
                f"{self._server.url} has weights labelled {label!r}, and version {self.version} was committed: it was "
                f"started anew, or somebody else has updated it; refit before using it",
                phase="commit",
            )

    def abort(self) -> None:
        """Forget what was staged and written. The server goes on with what it has."""
        super().abort()
        if self._written is not None and self._written not in self._told:
            shutil.rmtree(self._written, ignore_errors=True)
        self._written = None

    def _prepare_to_hand_over(self, version: int) -> None:
        """Write the staged weights as a checkpoint folder, and read it back, if the server answers."""
        self._label()
        target = self._folder / f"version-{version}"
        while target in self._told:  # a version that is repeated
            target = target.with_name(f"{target.name}-again")
        try:
            self._write(target)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            raise RefitError(f"{target} could not be written: {error}", phase="commit") from error
        self._written = target

    def _hand_over(self, version: int) -> None:
        """Have the server load the folder, see that it says so, and remove the one before."""
        written = self._written
        assert written is not None
        self._told.append(written)
        load = {"model_path": str(written), "load_format": "auto", "weight_version": str(version), "flush_cache": True}
        self._server.ask("POST", "/pause_generation", {"mode": self._requests}, timeout_s=self._timeout_s)
        try:
            answer = self._server.ask("POST", "/update_weights_from_disk", load, timeout_s=self._timeout_s)
        finally:
            self._server.ask("POST", "/continue_generation", {}, timeout_s=self._timeout_s)
        if answer.get("success") is not True:
            raise RefitError(f"{self._server.url} did not load {written}: {answer.get('message')}", phase="commit")
        if (label := self._label()) != str(version):
            raise RefitError(
                f"{self._server.url} says that it loaded {written}, and labels its weights {label!r}: somebody else "
                f"updates it too, or it is older than SGLang's `weight_version`",
                phase="commit",
            )
        for folder in self._told[:-1]:
            shutil.rmtree(folder, ignore_errors=True)
        self._told, self._written = [written], None

    def _label(self) -> str:
        label: str = str(self._server.ask("GET", "/model_info", None, timeout_s=ASK_S).get("weight_version"))
        return label

    def _write(self, target: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        partial = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for file in self._like.iterdir():
                if file.is_file() and not file.name.endswith(WEIGHTS):
                    shutil.copyfile(file, partial / file.name)
            save_file(self._fresh, partial / ONE_FILE, metadata={"format": "pt"})
            with safe_open(partial / ONE_FILE, framework="pt") as file:
                different = tuple(
                    name
                    for name, tensor in self._fresh.items()
                    if digest_tensor(file.get_tensor(name)) != digest_tensor(tensor)
                )
            if different:
                raise DigestError(
                    f"{target} does not hold what was written of {', '.join(different)}", tensors=different
                )
            shutil.rmtree(target, ignore_errors=True)  # of an earlier process
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@final
class _Server:
    """What the server is asked by HTTP, each time over a connection of its own."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or parts.hostname is None or parts.username is not None:
            raise ValueError(
                f"url must be http://host:port or https://host:port, without a password; got {parts.scheme}://"
                f"{parts.hostname}"
            )
        self.url = url.rstrip("/")
        self.name = re.sub(r"[^\w.-]", "-", parts.netloc + parts.path.rstrip("/"))
        """For a folder."""
        self._parts, self._key = parts, api_key

    def ask(self, method: str, path: str, body: Mapping[str, object] | None, *, timeout_s: float) -> dict[str, Any]:
        """The answer, which is JSON; of one that is not, nothing.

        Raises:
            RefitError: There was none in time, or it says that it failed and not why in SGLang's manner.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        place = self._parts.path.rstrip("/") + path
        try:
            connection.request(method, place, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RefitError(
                f"{method} {self.url}{path} was not answered: {type(error).__name__}: {error}; is SGLang there?"
            ) from error
        finally:
            connection.close()
        try:
            found: Any = json.loads(text)
        except ValueError:
            found = None
        answer: dict[str, Any] = found if isinstance(found, dict) else {}
        if status in {401, 403}:
            raise RefitError(
                f"{self.url}{path} refuses the caller ({status}): give api_key= the server's --admin-api-key"
            )
        if status == 404:
            raise RefitError(f"{self.url} has no {path}: it is no server of SGLang, or one that is too old")
        if status != 200 and "success" not in answer:
            raise RefitError(f"{method} {self.url}{path} failed with {status}: {text[:500].decode(errors='replace')}")
        return answer
