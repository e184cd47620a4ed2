"""The process between us and a program that is run under limits. A script: `sandbox.py` starts it, one a program.

Imports nothing of this package. Starts the program under its limits, waits for its end or the deadline, kills all that
it has started, and reports in one line of JSON. It is the subreaper of its descendants: one whose parent ends becomes
its child, so that none is lost by changing session. Resource isolation, not a security boundary.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
# From <linux/prctl.h> and <linux/sched.h>.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x00020000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18  # from <linux/mount.h>
PRIVATE = ["/tmp", "/var/tmp", "/dev/shm"]  # noqa: S108 - what everybody may write
KILLING_S = 10.0
"""How long to try to kill what a program has started; it takes milliseconds unless the program forks for its life."""


class RefusedError(Exception):
    """The program cannot be run as its limits promise."""


def main() -> None:
    """Run one program; see `sandbox.run_python`."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    try:
        report = supervise(config)
    except RefusedError as refused:
        report = {"refused": str(refused)}
    with os.fdopen(config["report"], "w") as pipe:
        json.dump(report, pipe)


def supervise(config: dict[str, Any]) -> dict[str, Any]:
    """The program's ending, after all its processes are gone."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    uid = unused_uid() if os.geteuid() == 0 else None
    isolated, alone = isolate(config)
    allowed = 1 + config["processes"] + (0 if uid is not None else 1 if alone else tasks_of(os.getuid()))
    if uid is not None:
        os.chown(config["cwd"], uid, uid)
    pid = start(config, uid=uid, processes=allowed)
    ended = wait(pid, config["wall_s"])
    ended["isolated"] = isolated
    gone = kill_all(pid, uid)
    if not gone:
        raise RefusedError(f"processes of the program were still there {KILLING_S} s after they were killed")
    return ended


def start(config: dict[str, Any], *, uid: int | None, processes: int) -> int:
    """Fork, set the limits in the child, and become the program there."""
    reading, writing = os.pipe()  # closed by exec: it carries only why there was none
    pid = os.fork()
    if pid == 0:
        try:
            os.close(config["report"])
            confine(config, uid=uid, processes=processes)
            home = {"HOME": config["cwd"], "TMPDIR": config["cwd"], "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
            command = [config["python"], "-I", "-S", "-B", "-X", "utf8", "main.py"]
            os.execve(config["python"], command, home)  # noqa: S606 - no shell is the point
        except BaseException as error:  # noqa: BLE001 - told to the parent; this process must end here
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        why = pipe.read().decode()
    if why:
        os.waitpid(pid, 0)
        user = "" if uid is None else f" by user {uid}, as whom programs run that root starts"
        raise RefusedError(
            f"the interpreter {config['python']} cannot be started{user}: {why}; name one that every user can read "
            f"by python=, or run as another user than root"
        )
    return pid


def confine(config: dict[str, Any], *, uid: int | None, processes: int) -> None:
    """Give up, for good, all that the program shall not have."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.chdir(config["cwd"])
    cpu_s = math.ceil(config["wall_s"])
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: config["memory_bytes"],
        resource.RLIMIT_FSIZE: config["file_bytes"],
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_NOFILE: config["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    for which, limit in limits.items():
        _, hard = resource.getrlimit(which)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (lowest, lowest))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which clears it


def isolate(config: dict[str, Any]) -> tuple[list[str], bool]:
    """Enter namespaces with nothing in them; what there is to itself, and whether a user namespace was entered.

    A user namespace counts processes anew.
    """
    flags = {"network": CLONE_NEWNET, "files": CLONE_NEWNS}
    wanted = {"network": config["network"], "files": config["files"]}
    hidden = [folder for folder in PRIVATE if not holds(folder, config["python"])]
    if wanted["files"] == "private" and len(hidden) < len(PRIVATE):
        raise RefusedError(
            f"files='private' would hide the interpreter {config['python']} itself; name one elsewhere by python="
        )
    asked = [name for name, how in wanted.items() if how != "host"]
    uid, gid = os.getuid(), os.getgid()
    own_user = 0 if os.geteuid() == 0 else CLONE_NEWUSER
    # All of them, or those without which the program must not run, or none.
    strict = [name for name in asked if wanted[name] != "auto"]
    attempts = [asked] + ([[name] for name in asked] if not strict else [strict])
    for names in attempts:
        if not names or LIBC.unshare(own_user | sum(flags[name] for name in names)) == 0:
            break
    else:
        if strict:
            reason = os.strerror(ctypes.get_errno())
            values = ", ".join(f"{name}={wanted[name]!r}" for name in strict)
            raise RefusedError(f"{values} needs the right to make a namespace, and unshare says: {reason}")
        names = []
    if names and own_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
    if "files" in names and not hide(hidden, config):
        if wanted["files"] == "private":
            raise RefusedError(f"files='private': mount says: {os.strerror(ctypes.get_errno())}")
        names = [name for name in names if name != "files"]
    return names, bool(names and own_user)


def holds(folder: str, python: str) -> bool:
    """Whether the interpreter lies in a folder, or what it links to does."""
    return any(Path(path).is_relative_to(folder) for path in (python, os.path.realpath(python)))


def hide(folders: list[str], config: dict[str, Any]) -> bool:
    """Mount an empty file system of bounded size over each folder, and over the program's own; whether it worked."""
    program, options = Path(config["cwd"], "main.py"), f"size={config['disk_bytes']},mode=1777"
    source = program.read_bytes()
    if LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:  # or the host would see what is mounted here
        return False
    for folder in [each for each in folders if Path(each).is_dir()]:
        if LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()) != 0:
            return False
    if not program.parent.is_dir():  # it lay in one of them
        program.parent.mkdir(parents=True)
    elif LIBC.mount(b"tmpfs", config["cwd"].encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()) != 0:
        return False
    program.write_bytes(source)
    return True


def wait(pid: int, wall_s: float) -> dict[str, Any]:
    """How the program ended, or that it did not in time. Its zombie stays, and with it its process group's number."""
    deadline = time.monotonic() + wall_s
    while True:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            exited = ended.si_code == os.CLD_EXITED
            return {"ending": "exit" if exited else "signal", "code": ended.si_status}
        left = deadline - time.monotonic()
        if left <= 0:
            return {"ending": "timeout", "code": 0}
        signal.sigtimedwait({signal.SIGCHLD}, left)


def kill_all(pid: int, uid: int | None) -> bool:
    """Kill the program and every descendant; whether all are gone."""
    until = time.monotonic() + KILLING_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # at once, so that nobody forks in between
    while reap():
        if time.monotonic() > until:
            return False
        if uid is not None:
            kill_user(uid)
        stopped: set[int] = set()
        while (new := descendants() - stopped) and time.monotonic() < until:
            stopped |= new
            send(new, signal.SIGSTOP)  # all of them first: one that is killed may have a sibling that forks again
        send(stopped, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)
    return True


def reap() -> bool:
    """Bury the dead; whether any child is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def kill_user(uid: int) -> None:
    """Kill all processes of a user who has no others: the kernel does it at once, however fast they fork."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def descendants() -> set[int]:
    """All processes below this one, the dead excepted."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found, queue = set(), [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def send(pids: set[int], number: int) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def tasks_of(uid: int) -> int:
    """How many processes and threads a user has: the kernel's limit is on their number, not on that of new ones."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    total += len(os.listdir(entry / "task"))  # noqa: PTH208 - names are enough
    return total


def unused_uid() -> int | None:
    """A user id that nothing else runs as; None where root is the only user that there is, as in some containers."""
    start, _, length = max(
        (list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()),
        key=lambda entry: entry[2],
    )
    if length < 2:
        return None
    top = min(start + length - 1, (1 << 31) - 2)  # some programs keep user ids in 32 bits with a sign
    spread = min(1 << 22, (top - start + 1) // 2)  # no two processes that live have one number
    return top - os.getpid() % spread


if __name__ == "__main__":
    main()
