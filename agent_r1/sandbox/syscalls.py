"""A seccomp filter that denies the system calls that code in the sandbox does not need.

A denied call fails with EPERM, which is a ``PermissionError`` in Python. ``clone3`` fails with ENOSYS, so that the C
library uses ``clone`` instead.
"""

from __future__ import annotations

import errno
import tempfile
from functools import lru_cache

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
    """Return the filter of system calls, as a BPF program for ``bwrap --seccomp``. ``pyseccomp`` must
    be installed.

    The filter kills a process that makes a system call of another CPU architecture.
    """
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
