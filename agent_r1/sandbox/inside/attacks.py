"""What code in the sandbox must not be able to do, tried for real: each function is true where it could.

An attack that raises was stopped. ``world`` names what there is to be had outside: a secret, a listening port, a
victim process. Attacks are harmless where they succeed, and bombs go off only a little past the limit, so that the
same list can be run with layers removed.
"""

import ctypes
import os
import platform
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER = 0x10000000
CLONE_FLAGS = ctypes.c_ulong(NEW_USER | 1 << 33 | 17)  # SIGCHLD, and a bit that only the upper half has
NAMES = ("clone", "keyctl", "add_key", "bpf", "perf_event_open", "userfaultfd", "shmget", "io_uring_setup", "clone3")
NUMBERS = {
    "x86_64": (56, 250, 248, 321, 298, 323, 29, 425, 435),
    "aarch64": (220, 219, 217, 280, 241, 282, 194, 425, 435),
}
CALLS = dict(zip(NAMES, NUMBERS.get(platform.machine(), ()), strict=False))

Attack = Callable[[Any], bool]
ATTACKS: dict[str, Attack] = {
    "read_secret": lambda taskset: taskset["token"].encode() in text_of(taskset["secret"]),
    "list_host_folder": lambda taskset: bool(os.listdir(taskset["folder"])),
    "read_users": lambda taskset: bool(text_of("/etc/passwd")),
    "read_environment": lambda taskset: taskset["variable"] in os.environ,
    "read_environment_of_others": lambda taskset: bool(text_of(f"/proc/{taskset['victim']}/environ")),
    "list_processes": lambda taskset: str(taskset["victim"]) in os.listdir("/proc"),
    "read_host_name": lambda taskset: os.uname().nodename == taskset["host"],
    "use_inherited_file": lambda taskset: any(is_token(fd, taskset) for fd in range(3, 256)),
    "read_kernel_log": lambda taskset: LIBC.klogctl(10, None, 0) >= 0,
    "list_network_devices": lambda taskset: len(socket.if_nameindex()) > 1,
    "trace_other": lambda taskset: LIBC.ptrace(0x4206, taskset["victim"], None, None) == 0,
    "make_user_namespace": lambda taskset: LIBC.unshare(NEW_USER) == 0,
    "clone_user_namespace": lambda taskset: parent_of(system_call("clone", CLONE_FLAGS, 0, 0, 0, 0)),
    "change_personality": lambda taskset: LIBC.personality(ctypes.c_ulong(0xFFFFFFFF)) >= 0,
    "memory_bomb": lambda taskset: len(bytearray(2 * taskset["memory"])) > taskset["memory"],
    "file_bomb": lambda taskset: filled([f"/tmp/bomb-{os.getpid()}"], 2 * taskset["disk"]),
    "disk_bomb": lambda taskset: filled([f"/tmp/bomb-{os.getpid()}-{i}" for i in range(4)], taskset["disk"] // 2),
}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


def system_call(name: str, *args: Any) -> int:
    """Its result; raises where it fails."""
    result = LIBC.syscall(CALLS[name], *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def by_call(title: str, name: str, *args: Any) -> None:
    """An attack that is one system call, and succeeds where that does."""
    ATTACKS[title] = lambda taskset: system_call(name, *args) >= 0


def text_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


# what is there to be read


@attack
def read_secret_by_link(taskset: Any) -> bool:
    link = f"/tmp/link-{os.getpid()}"
    os.symlink(taskset["secret"], link)
    try:
        return bool(text_of(link))
    finally:
        os.unlink(link)


def is_token(fd: int, taskset: Any) -> bool:
    try:
        return taskset["token"].encode() in os.pread(fd, 100, 0)
    except OSError:
        return False


# what is there to be written


@attack
def write_beside_secret(taskset: Any) -> bool:
    path = os.path.join(taskset["folder"], "written")
    open(path, "w").close()
    os.unlink(path)
    return True


@attack
def write_root_folder(taskset: Any) -> bool:
    path = f"/written-{os.getpid()}"
    open(path, "w").close()
    os.unlink(path)
    return True


@attack
def write_standard_library(taskset: Any) -> bool:
    open(os.__file__, "r+b").close()
    return True


@attack
def write_interpreter(taskset: Any) -> bool:
    os.utime(sys.executable)
    return True


@attack
def write_kernel_setting(taskset: Any) -> bool:
    open("/proc/sys/kernel/core_pattern", "r+").close()
    return True


@attack
def make_device(taskset: Any) -> bool:
    path = f"/tmp/device-{os.getpid()}"
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.unlink(path)
    return True


@attack
def mount_something(taskset: Any) -> bool:
    place = f"/tmp/mount-{os.getpid()}"
    os.mkdir(place)
    made = LIBC.mount(b"none", place.encode(), b"tmpfs", 0, None) == 0
    if made:
        LIBC.umount2(place.encode(), 2)
    os.rmdir(place)
    return made


@attack
def change_root(taskset: Any) -> bool:
    os.chroot("/tmp")
    return True


# who is there to be reached


@attack
def connect_to_port(taskset: Any) -> bool:
    socket.create_connection(("127.0.0.1", taskset["port"]), 1).close()
    return True


@attack
def send_datagram(taskset: Any) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        return line.sendto(b"secret", ("127.0.0.1", taskset["port"])) > 0


@attack
def connect_to_abstract_socket(taskset: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + taskset["abstract"])
        return True


@attack
def connect_to_socket_file(taskset: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.path.join(taskset["folder"], "line"))
        return True


@attack
def open_netlink(taskset: Any) -> bool:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    return True


@attack
def open_virtual_machine_socket(taskset: Any) -> bool:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return True


@attack
def signal_other(taskset: Any) -> bool:
    os.kill(taskset["victim"], 0)
    return True


@attack
def slow_other_down(taskset: Any) -> bool:
    os.setpriority(os.PRIO_PROCESS, taskset["victim"], 19)
    return True


# what would be more than it has


@attack
def be_root(taskset: Any) -> bool:
    if os.geteuid() != 0:
        os.setuid(0)
    return True


@attack
def have_capabilities(taskset: Any) -> bool:
    header, data = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    if LIBC.capget(header, data) != 0:
        return False
    effective, permitted, _ = struct.unpack("=3I", data.raw[:12])
    return bool(effective or permitted)


@attack
def clone3_user_namespace(taskset: Any) -> bool:
    arguments = ctypes.create_string_buffer(struct.pack("=11Q", NEW_USER, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))
    return parent_of(system_call("clone3", arguments, ctypes.c_size_t(88)))


def parent_of(child: int) -> bool:
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


by_call("use_key_ring", "keyctl", 0, -3, 1)
by_call("add_key", "add_key", b"user", b"agent-r1", b"x", ctypes.c_size_t(1), -2)
by_call("set_up_io_uring", "io_uring_setup", 4, ctypes.create_string_buffer(120))
by_call("handle_page_faults", "userfaultfd", 1)
by_call("shared_memory", "shmget", 0, ctypes.c_size_t(2**20), 0o1600)


@attack
def load_bpf(taskset: Any) -> bool:
    attributes = ctypes.create_string_buffer(struct.pack("=4I", 2, 4, 4, 1), 72)
    return system_call("bpf", 0, attributes, 72) >= 0


@attack
def count_cycles(taskset: Any) -> bool:
    attributes = ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0), 112)
    attributes[40] = bytes([0b01100000])  # exclude_kernel, exclude_hv
    return system_call("perf_event_open", attributes, 0, -1, -1, ctypes.c_ulong(0)) >= 0


@attack
def raise_limits(taskset: Any) -> bool:
    for name in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        resource.setrlimit(name, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return True


# bombs


@attack
def fork_bomb(taskset: Any) -> bool:
    read, write = os.pipe()
    children: list[int] = []
    try:
        while len(children) < 3 * taskset["processes"]:
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            children.append(child)
    finally:
        os.close(write)
        for child in children:
            os.waitpid(child, 0)
    return True


@attack
def thread_bomb(taskset: Any) -> bool:
    stop = threading.Event()
    try:
        for _ in range(3 * taskset["processes"]):
            threading.Thread(target=stop.wait, daemon=True).start()
    finally:
        stop.set()
    return True


@attack
def uncounted_memory(taskset: Any) -> bool:
    file = os.memfd_create("bomb")
    try:
        return sum(os.write(file, bytes(2**20)) for _ in range(taskset["disk"] // 2**20)) > 0
    finally:
        os.close(file)


def filled(paths: list[str], size: int) -> bool:
    try:
        for path in paths:
            with open(path, "wb") as file:
                for _ in range(size // 2**18):
                    file.write(bytes(2**18))
        return True
    finally:
        for path in paths:
            if os.path.exists(path):
                os.unlink(path)


@attack
def descriptor_bomb(taskset: Any) -> bool:
    opened: list[int] = []
    try:
        while len(opened) < 2 * taskset["open_files"]:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for file in opened:
            os.close(file)
    return True


@attack
def memory_of_many(taskset: Any) -> bool:
    """Three together hold more than one may. What stops it may kill the process that tries."""
    held_read, held_write = os.pipe()
    free_read, free_write = os.pipe()
    for _ in range(3):
        if os.fork() == 0:
            os.close(free_write)
            held = bytearray(b"x") * (taskset["memory"] // 2)
            os.write(held_write, held[:1])
            os.read(free_read, 1)
            os._exit(0)
    os.set_blocking(held_read, False)
    together = 0
    while together < 3 and os.waitpid(-1, os.WNOHANG) == (0, 0):  # none of them was killed
        try:
            together += len(os.read(held_read, 3))
        except BlockingIOError:
            time.sleep(0.01)
    return together == 3


def assault(taskset: Any, names: list[str]) -> None:
    """Try those named, or all that leave their process alive; print hit or stopped, the name, what it was told."""
    for name in names or [name for name in ATTACKS if name != "memory_of_many"]:
        try:
            result = "hit" if ATTACKS[name](taskset) else "stopped"
            told = ""
        except BaseException as error:
            result, told = "stopped", f"{type(error).__name__}: {error}"
        print(result, name, " ".join(told.split()), flush=True)
