"""Attacks on the sandbox, sent into it as text. Each function returns True if the attack succeeded.

An attack that raises was blocked. ``targets`` names the objects outside: a secret file, a listening port, a victim
process. Attacks do no harm if they succeed, and bombs exceed their limit only a little, so that the same list can be
run with layers removed.
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
    "read_secret": lambda targets: targets["token"].encode() in read_bytes(targets["secret"]),
    "list_host_folder": lambda targets: bool(os.listdir(targets["folder"])),
    "read_users": lambda targets: bool(read_bytes("/etc/passwd")),
    "read_environment": lambda targets: targets["variable"] in os.environ,
    "read_environment_of_others": lambda targets: bool(read_bytes(f"/proc/{targets['victim']}/environ")),
    "list_processes": lambda targets: str(targets["victim"]) in os.listdir("/proc"),
    "read_host_name": lambda targets: os.uname().nodename == targets["host"],
    "use_inherited_file": lambda targets: any(holds_token(fd, targets) for fd in range(3, 2**16)),
    "read_kernel_log": lambda targets: LIBC.klogctl(10, None, 0) >= 0,
    "list_network_devices": lambda targets: len(socket.if_nameindex()) > 1,
    "trace_other": lambda targets: LIBC.ptrace(0x4206, targets["victim"], None, None) == 0,
    "make_user_namespace": lambda targets: LIBC.unshare(NEW_USER) == 0,
    "clone_user_namespace": lambda targets: wait_for(system_call("clone", CLONE_FLAGS, 0, 0, 0, 0)),
    "change_personality": lambda targets: LIBC.personality(ctypes.c_ulong(0xFFFFFFFF)) >= 0,
    "memory_bomb": lambda targets: len(bytearray(2 * targets["memory"])) > targets["memory"],
    "file_bomb": lambda targets: fill_files([f"/tmp/bomb-{os.getpid()}"], 2 * targets["disk"]),
    "disk_bomb": lambda targets: fill_files([f"/tmp/bomb-{os.getpid()}-{i}" for i in range(4)], targets["disk"] // 2),
}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


def system_call(name: str, *args: Any) -> int:
    """Return the result of a system call. Raises OSError if it fails."""
    result = LIBC.syscall(CALLS[name], *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def add_system_call(title: str, name: str, *args: Any) -> None:
    """Add an attack that consists of one system call."""
    ATTACKS[title] = lambda targets: system_call(name, *args) >= 0


def read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


# reading


@attack
def read_secret_by_link(targets: Any) -> bool:
    link = f"/tmp/link-{os.getpid()}"
    os.symlink(targets["secret"], link)
    try:
        return bool(read_bytes(link))
    finally:
        os.unlink(link)


def holds_token(fd: int, targets: Any) -> bool:
    try:
        return targets["token"].encode() in os.pread(fd, 100, 0)
    except OSError:
        return False


# writing


@attack
def write_beside_secret(targets: Any) -> bool:
    path = os.path.join(targets["folder"], "written")
    open(path, "w", encoding="utf-8").close()
    os.unlink(path)
    return True


@attack
def write_root_folder(targets: Any) -> bool:
    path = f"/written-{os.getpid()}"
    open(path, "w", encoding="utf-8").close()
    os.unlink(path)
    return True


@attack
def write_standard_library(targets: Any) -> bool:
    open(os.__file__, "r+b").close()
    return True


@attack
def write_interpreter(targets: Any) -> bool:
    os.utime(sys.executable)
    return True


@attack
def write_kernel_setting(targets: Any) -> bool:
    open("/proc/sys/kernel/core_pattern", "r+", encoding="utf-8").close()
    return True


@attack
def make_device(targets: Any) -> bool:
    path = f"/tmp/device-{os.getpid()}"
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.unlink(path)
    return True


@attack
def mount_something(targets: Any) -> bool:
    place = f"/tmp/mount-{os.getpid()}"
    os.mkdir(place)
    made = LIBC.mount(b"none", place.encode(), b"tmpfs", 0, None) == 0
    if made:
        LIBC.umount2(place.encode(), 2)
    os.rmdir(place)
    return made


@attack
def change_root(targets: Any) -> bool:
    os.chroot("/tmp")
    return True


# reaching others


@attack
def connect_to_port(targets: Any) -> bool:
    socket.create_connection(("127.0.0.1", targets["port"]), 1).close()
    return True


@attack
def send_datagram(targets: Any) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        return line.sendto(b"secret", ("127.0.0.1", targets["port"])) > 0


@attack
def connect_to_abstract_socket(targets: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + targets["abstract"])
        return True


@attack
def connect_to_socket_file(targets: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.path.join(targets["folder"], "line"))
        return True


@attack
def open_netlink(targets: Any) -> bool:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    return True


@attack
def open_virtual_machine_socket(targets: Any) -> bool:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return True


@attack
def signal_other(targets: Any) -> bool:
    os.kill(targets["victim"], 0)
    return True


@attack
def slow_other_down(targets: Any) -> bool:
    os.setpriority(os.PRIO_PROCESS, targets["victim"], 19)
    return True


# gaining privileges


@attack
def be_root(targets: Any) -> bool:
    if os.geteuid() != 0:
        os.setuid(0)
    return True


@attack
def have_capabilities(targets: Any) -> bool:
    header, data = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    if LIBC.capget(header, data) != 0:
        return False
    effective, permitted, _ = struct.unpack("=3I", data.raw[:12])
    return bool(effective or permitted)


@attack
def clone3_user_namespace(targets: Any) -> bool:
    arguments = ctypes.create_string_buffer(struct.pack("=11Q", NEW_USER, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))
    return wait_for(system_call("clone3", arguments, ctypes.c_size_t(88)))


def wait_for(child: int) -> bool:
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


add_system_call("use_key_ring", "keyctl", 0, -3, 1)
add_system_call("add_key", "add_key", b"user", b"agent-r1", b"x", ctypes.c_size_t(1), -2)
add_system_call("set_up_io_uring", "io_uring_setup", 4, ctypes.create_string_buffer(120))
add_system_call("handle_page_faults", "userfaultfd", 1)
add_system_call("shared_memory", "shmget", 0, ctypes.c_size_t(2**20), 0o1600)


@attack
def load_bpf(targets: Any) -> bool:
    attributes = ctypes.create_string_buffer(struct.pack("=4I", 2, 4, 4, 1), 72)
    return system_call("bpf", 0, attributes, 72) >= 0


@attack
def count_cycles(targets: Any) -> bool:
    attributes = ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0), 112)
    attributes[40] = bytes([0b01100000])  # exclude_kernel, exclude_hv
    return system_call("perf_event_open", attributes, 0, -1, -1, ctypes.c_ulong(0)) >= 0


@attack
def raise_limits(targets: Any) -> bool:
    for name in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        resource.setrlimit(name, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return True


# bombs


@attack
def fork_bomb(targets: Any) -> bool:
    read, write = os.pipe()
    children: list[int] = []
    try:
        while len(children) < 3 * targets["processes"]:
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
def thread_bomb(targets: Any) -> bool:
    stop = threading.Event()
    try:
        for _ in range(3 * targets["processes"]):
            threading.Thread(target=stop.wait, daemon=True).start()
    finally:
        stop.set()
    return True


@attack
def uncounted_memory(targets: Any) -> bool:
    file = os.memfd_create("bomb")
    try:
        return sum(os.write(file, bytes(2**20)) for _ in range(targets["disk"] // 2**20)) > 0
    finally:
        os.close(file)


def fill_files(paths: list[str], size: int) -> bool:
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
def descriptor_bomb(targets: Any) -> bool:
    opened: list[int] = []
    try:
        while len(opened) < 2 * targets["open_files"]:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for file in opened:
            os.close(file)
    return True


@attack
def memory_of_many(targets: Any) -> bool:
    """Hold more memory in three processes than one may. The kernel may kill the attacker for it."""
    held_read, held_write = os.pipe()
    free_read, free_write = os.pipe()
    for _ in range(3):
        if os.fork() == 0:
            os.close(free_write)
            held = bytearray(b"x") * (targets["memory"] // 2)
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


def run_attacks(targets: Any, names: list[str]) -> None:
    """Run the named attacks. Print a line for each: hit or stopped, the name, and the error."""
    for name in names:
        try:
            result = "hit" if ATTACKS[name](targets) else "stopped"
            reason = ""
        except BaseException as error:
            result, reason = "stopped", f"{type(error).__name__}: {error}"
        print(result, name, " ".join(reason.split()), flush=True)
