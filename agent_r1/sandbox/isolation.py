"""The isolation layers of the sandbox, and the command line that starts a process inside them."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from agent_r1.sandbox.config import Limits

WORKER = Path(__file__).parent / "inside" / "worker.py"


class IsolationLayer(StrEnum):
    """A layer of isolation. docs/sandbox.md lists the attacks that each layer blocks."""

    FILES = "files"
    NETWORK = "network"
    PROCESSES = "processes"
    SYSCALLS = "syscalls"
    USER = "user"
    LIMITS = "limits"
    CGROUP = "cgroup"


ALL_LAYERS = frozenset(IsolationLayer)

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # sets are printed in the same order in every run, so that equal runs give equal tokens
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_FIRST_SPARE_UID, _NOBODY, _UIDS_PER_TRAINER = 2_000_000_000, 65534, 4096
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Confinement:
    """The isolation of a process."""

    layers: frozenset[IsolationLayer]  # empty: the process is not isolated
    limits: Limits
    packages: tuple[Path, ...] = ()  # folders from which the process can import modules

    @property
    def spare_user(self) -> bool:
        """Whether each program runs under a user id of its own. Without root, it runs in a user namespace instead."""
        return IsolationLayer.USER in self.layers and os.geteuid() == 0

    def command(self, control: int, filter_fd: int | None) -> list[str]:
        """Return the command that starts the worker, which reads requests from the socket ``control``."""
        worker = [*_python(), str(WORKER), str(control), str(spare_uid()) if self.spare_user else "-", self._rlimits()]
        if not self.layers:
            return worker
        return [_bwrap(), *self._bubblewrap(filter_fd), "--", *worker]

    def environment(self) -> Mapping[str, str]:
        """Return the complete environment of the confined process."""
        return _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, self.packages))}

    def _rlimits(self) -> str:
        if IsolationLayer.LIMITS not in self.layers:
            return ""
        limits = self.limits
        values = {
            "RLIMIT_AS": limits.memory,
            "RLIMIT_CPU": limits.cpu_seconds,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_FSIZE": limits.disk,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        return ",".join(f"{name}={value}" for name, value in values.items())

    def _bubblewrap(self, filter_fd: int | None) -> Iterator[str]:
        yield from ("--die-with-parent", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox")
        yield from ("--unshare-cgroup-try", "--cap-drop", "ALL")
        if IsolationLayer.NETWORK in self.layers:
            yield "--unshare-net"
        if IsolationLayer.PROCESSES in self.layers:
            yield "--unshare-pid"
        if self.spare_user:
            # The worker drops these two capabilities when it changes its user id.
            yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        if os.geteuid() != 0:
            yield "--unshare-user"
        if IsolationLayer.USER in self.layers and os.geteuid() != 0:
            yield from ("--disable-userns", "--uid", str(_NOBODY), "--gid", str(_NOBODY))
        if IsolationLayer.SYSCALLS in self.layers:
            yield from ("--seccomp", str(filter_fd))
        yield from self._private_files() if IsolationLayer.FILES in self.layers else self._host_files()

    def _private_files(self) -> Iterator[str]:
        yield from ("--perms", "1777", "--size", str(self.limits.disk), "--tmpfs", "/tmp")
        links = {path: os.readlink(path) for path in _LIBRARIES if os.path.islink(path)}
        folders = [path for path in _LIBRARIES if os.path.isdir(path) and path not in links]
        yield from _read_only([*folders, *self._own_paths()])
        for path, target in links.items():
            yield from ("--symlink", target, path)
        yield from ("--perms", "0755", "--dir", "/dev")
        for device in _DEVICES:
            yield from ("--dev-bind", device, device)
        yield from ("--remount-ro", "/", "--chdir", "/tmp")

    def _host_files(self) -> Iterator[str]:
        # Programs see the host's file system. A spare user cannot read folders such as /root, so what a program needs
        # of them is mounted.
        yield from ("--dev-bind", "/", "/", "--chdir", "/tmp")
        if self.spare_user:
            private = {
                top for path in self._own_paths() for top in Path(path).parents if top.stat().st_mode & 0o5 != 0o5
            }
            for home in (home for home in sorted(private) if private.isdisjoint(home.parents)):
                yield from ("--perms", "0755", "--tmpfs", str(home))
                yield from _read_only([path for path in self._own_paths() if Path(path).is_relative_to(home)], home)

    def _own_paths(self) -> list[str]:
        # Return the paths that a program needs, except paths in the system's library folders.
        paths = [*interpreter(), *map(str, self.packages), str(WORKER)]
        return [path for path in paths if not any(Path(path).is_relative_to(library) for library in _LIBRARIES)]


def _read_only(paths: Sequence[str], top: Path = Path("/")) -> Iterator[str]:
    # A parent folder is created only if the parent folder is inside the folder ``top``, and is not ``/tmp``.
    # Only root could read parent folders that bubblewrap creates by itself.
    for parent in sorted({parent for path in paths for parent in Path(path).parents}):
        if top in parent.parents and parent != Path("/tmp"):
            yield from ("--perms", "0755", "--dir", str(parent))
    for path in paths:
        yield from ("--ro-bind", path, path)


def interpreter() -> list[str]:
    """Return the paths of the running Python binary and of the parent folder of its standard library."""
    standard = Path(os.__file__).resolve().parents[1]
    return [os.path.realpath(sys.executable), str(standard)]


def _python() -> list[str]:
    # without the packages and folders of this machine (-s -S -P), and without bytecode files (-B)
    return [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-X", "utf8"]


def _bwrap() -> str:
    return shutil.which("bwrap") or "bwrap"


def spare_uid() -> int:
    """Return a user id that no user of this machine has, or 65534 if this user namespace does not contain it."""
    # The kernel limits processes per user id. With a shared id, a program could use up another program's processes.
    uid = _FIRST_SPARE_UID + os.getpid() % 2**15 * _UIDS_PER_TRAINER + next(_serial) % _UIDS_PER_TRAINER
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text("utf-8").splitlines()]
    return uid if any(first <= uid < first + count for first, _, count in ranges) else _NOBODY


try:
    import pyseccomp
except (ImportError, OSError, RuntimeError):  # OSError or RuntimeError if libseccomp is missing
    pyseccomp = None

# A list of allowed calls would change with each version of CPython and its packages.
DENIED = (
    # namespaces and mounts
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "quotactl", "quotactl_fd", "swapon", "swapoff"),
    # other processes
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    # the kernel
    *("bpf", "perf_event_open", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module"),
    *("reboot", "iopl", "ioperm", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("syslog", "acct", "personality", "modify_ldt", "vhangup", "uselib", "lookup_dcookie", "fanotify_init"),
    # keys, clocks, names
    *("keyctl", "add_key", "request_key", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex"),
    *("sethostname", "setdomainname"),
    # files by handle, and memory that no limit includes
    *("name_to_handle_at", "open_by_handle_at", "mknod", "mknodat", "memfd_create", "memfd_secret"),
    *("shmget", "shmat", "semget", "msgget", "mq_open", "mbind", "migrate_pages", "move_pages"),
    # the network; socketpair is allowed, because event loops need it
    *("socket", "connect", "bind", "listen"),
)

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_LOW_HALF = 0xFFFFFFFF  # the kernel reads only the low 32 bits of these arguments


@lru_cache(maxsize=1)
def filter_program() -> bytes:
    """Return the filter of system calls, as a BPF program for ``bwrap --seccomp``. It needs ``pyseccomp``."""
    # The default filter kills a process that makes a system call of another CPU architecture.
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in DENIED:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        if number >= 0:  # a negative number means that this architecture or libseccomp has no such call
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), number)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for bit in (1 << place for place in range(32) if _NEW_NAMESPACES >> place & 1):
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, bit, bit))
    for request in (_TIOCSTI, _TIOCLINUX):
        argument = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, _LOW_HALF, request)
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "ioctl", argument)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
