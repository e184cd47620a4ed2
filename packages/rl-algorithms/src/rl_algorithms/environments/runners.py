"""Runners of programs behind a real boundary, for `CodeTests(runner=...)`: bubblewrap, and a sandbox service over HTTP.

CodeTests(runner=Bubblewrap())                                        # the program `bwrap` on this machine
CodeTests(runner=RemoteSandbox("http://sandbox:8080/run_code"))      # SandboxFusion's form, which verl uses
"""

import json
import math
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms.environments.sandbox import Execution, Limits, SandboxError

__all__ = ["Bubblewrap", "RemoteSandbox"]

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""What programs may read of this machine: no home, no configuration, no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """Runs programs by `bwrap`: namespaces of their own for users, processes, network and files.

    A program sees the system's folders read-only, and an empty `/tmp` of `Limits.disk_bytes`. `Limits.network` must not
    be `"host"`. Rights and quirks of bubblewrap: https://github.com/containers/bubblewrap.
    """

    python: str = "/usr/bin/python3"
    """The interpreter, in one of the system's folders; `Limits.python` goes before it."""

    bwrap: str = "bwrap"
    """The program, by name or path."""

    def __call__(self, source: str, *, stdin: str, limits: Limits) -> Execution:
        """Run it to its end or its deadline.

        Raises:
            SandboxError: bubblewrap is not installed, cannot make its namespaces, or the network is asked for.
        """
        if limits.network == "host":
            raise SandboxError("network='host' and bubblewrap: its programs have no network; leave network out")
        if shutil.which(self.bwrap) is None:
            raise SandboxError(f"{self.bwrap} is not installed; apt-get install bubblewrap, or name its path by bwrap=")
        folders = [part for folder in SYSTEM if Path(folder).exists() for part in ("--ro-bind", folder, folder)]
        cpu_s = math.ceil(limits.wall_s)
        bounds = [f"--as={limits.memory_bytes}", f"--cpu={cpu_s}", f"--fsize={limits.file_bytes}", "--core=0"]
        bounds += [f"--nofile={limits.open_files}"]
        with tempfile.TemporaryDirectory(prefix="rl-bwrap-") as directory:
            program = Path(directory, "main.py")
            program.write_bytes(source.encode("utf-8", "replace"))
            command = [self.bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", *folders]
            command += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]  # noqa: S108
            command += ["--ro-bind", str(program), "/main.py", "--chdir", "/tmp", "--setenv", "HOME", "/tmp"]  # noqa: S108
            command += ["prlimit", *bounds, limits.python or self.python, "-I", "-S", "-B", "-X", "utf8", "/main.py"]
            process = subprocess.Popen(  # noqa: S603 - no shell
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            try:
                out, err = process.communicate(stdin.encode("utf-8", "replace"), timeout=limits.wall_s)
                timed_out = False
            except subprocess.TimeoutExpired:
                process.kill()  # and with it, by --die-with-parent, all that it has started
                out, err = process.communicate()
                timed_out = True
        if err.startswith(b"bwrap: ") and not out:
            raise SandboxError(f"bubblewrap cannot run programs here: {err.decode('utf-8', 'replace').strip()[:300]}")
        return _execution(out, err, code=process.returncode, timed_out=timed_out, limits=limits)


@dataclass(frozen=True, slots=True)
class RemoteSandbox:
    """Runs programs by a sandbox service with SandboxFusion's `run_code`: what verl's `sandbox_fusion.url` names.

    Only `wall_s` and `memory_bytes` of the limits reach it; what else a program may do is the service's affair.
    """

    url: str
    """Of `run_code`, such as `http://127.0.0.1:8080/run_code`."""

    grace_s: float = 30.0
    """Seconds beyond the program's own that an answer may take."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} must begin with http:// or https://")

    def __call__(self, source: str, *, stdin: str, limits: Limits) -> Execution:
        """Run it to its end or its deadline.

        Raises:
            SandboxError: the service cannot be reached, does not answer in time, or says that it failed itself.
        """
        request = {
            "code": source,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": math.ceil(limits.memory_bytes / 2**20),
        }
        asked = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self.url, data=json.dumps(request).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=limits.wall_s + self.grace_s) as answer:  # noqa: S310
                reply: dict[str, Any] = json.load(answer)
        except (urllib.error.URLError, TimeoutError, ValueError, OSError) as error:
            raise SandboxError(f"the sandbox service {self.url} did not answer: {error}") from error
        result = reply.get("run_result")
        if reply.get("status") == "SandboxError" or not isinstance(result, dict):
            raise SandboxError(f"the sandbox service {self.url} failed: {str(reply.get('message') or reply)[:300]}")
        return _execution(
            str(result.get("stdout") or "").encode(),
            str(result.get("stderr") or "").encode(),
            code=int(result.get("return_code") or 0),
            timed_out=result.get("status") == "TimeLimitExceeded",
            limits=limits,
        )


def _execution(out: bytes, err: bytes, *, code: int, timed_out: bool, limits: Limits) -> Execution:
    # A shell and bwrap report a program that a signal ended by 128 and the signal's number.
    signal = -code if code < 0 else code - 128 if code > 128 else 0
    most = limits.output_bytes
    return Execution(
        ending="timeout" if timed_out else "signal" if signal else "exit",
        code=0 if timed_out else signal or code,
        stdout=out[:most].decode("utf-8", "replace"),
        stderr=err[:most].decode("utf-8", "replace"),
        cut=len(out) > most or len(err) > most,
        isolated=frozenset({"network", "files"}),
    )
