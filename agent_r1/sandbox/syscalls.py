"""A seccomp filter that denies system calls for which code in the sandbox has no use.

It is a deny list, because the calls that CPython and its packages need change from version to version, and the
calls that reach rarely used parts of the kernel do not. A denied call fails with EPERM, which a program sees as
``PermissionError``; ``clone3`` fails with ENOSYS, whereupon the C library uses ``clone``.
"""

from __future__ import annotations

import errno
import tempfile
from functools import lru_cache

try:
    import pyseccomp
except (ImportError, OSError, RuntimeError):  # the last two if libseccomp is missing
    pyseccomp = None

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
    # files by handle, and memory that counts toward no limit
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
    """Return the filter as a BPF program for ``bwrap --seccomp``. System calls of other architectures kill the process.

    It needs pyseccomp, which is None in this module if it or libseccomp is missing.
    """
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in DENIED:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        if number >= 0:  # negative if this architecture or this libseccomp does not know the name
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
