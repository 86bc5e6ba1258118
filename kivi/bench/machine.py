"""The machine: its processor, caches, memory and read bandwidth, and the number of threads that everything measured here uses."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kivi.bench.result import Machine
from kivi.bench.timing import Call, clock_for
from kivi.errors import InputError

THREADS = "KIVI_CPU_THREADS"
PACKAGES = ("kivi-kvcache", "numpy", "torch", "transformers", "llvmlite", "optimum-quanto", "hqq", "xllamacpp")
ASSUMED_CACHE = 32 << 20  # bytes, where the system does not say
ROTATION = 4  # copies of a history together exceed the last-level cache this many times


def last_level_cache() -> int:
    """Bytes of the largest cache of processor 0: sysfs, else sysconf, else ASSUMED_CACHE."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number, unit = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip()).groups()  # type: ignore[union-attr]
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit])
    for name in ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        if not sizes and name in getattr(os, "sysconf_names", {}):
            sizes += [size for size in (os.sysconf(name),) if size > 0]
    return max(sizes, default=ASSUMED_CACHE)


def copies(bytes_of_one: int) -> int:
    """How many histories of this size together exceed ROTATION times the last-level cache, as the layers of a model do."""
    return max(1, -(-ROTATION * last_level_cache() // bytes_of_one))


def available_memory() -> int:
    """Bytes that a process may still take without swapping."""
    try:
        text = Path("/proc/meminfo").read_text()
        return int(re.search(r"MemAvailable:\s+(\d+) kB", text).group(1)) << 10  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return total_memory() // 2


def total_memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def using(threads: int) -> Iterator[None]:
    """torch and kivi with this many threads; afterwards as before. Raises `InputError` for more than there are processors."""
    import torch

    if threads > processors():
        raise InputError(f"threads = {threads}: this process may use {processors()} processors, and more threads would disturb each other")
    before, named = torch.get_num_threads(), os.environ.get(THREADS)
    torch.set_num_threads(threads)
    os.environ[THREADS] = str(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if named is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = named


def reader() -> Call:
    """A sum over an array that no cache holds: it adds a number while the next ones arrive, so it takes the time of reading."""
    import torch

    x = torch.ones(ROTATION * last_level_cache() // 4)
    return Call("read", lambda i: x.sum(), x.numel() * 4)


def read_rate(threads: int, rounds: int = 7) -> float:
    """Bytes a second that `threads` threads read: the best of some rounds, since a machine cannot read faster than it can."""
    clock, call = clock_for(threads), reader()
    with using(threads):
        call.run(0)
        times = []
        for i in range(rounds):
            start = clock()
            call.run(i)
            times.append(clock() - start)
    return call.bytes / min(times)


def describe(threads: list[int]) -> Machine:
    """This machine, and its read bandwidth with one thread, with all, and with each of `threads`."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before the measurements below add to it
    return Machine(
        processor=processor(),
        architecture=platform.machine(),
        cpus=processors(),
        last_level_cache=last_level_cache(),
        memory=total_memory(),
        system=platform.platform(),
        load=load,
        read_rate={str(n): read_rate(n) for n in sorted({1, processors(), *threads})},
    )


def processor() -> str:
    """The processor's name, with family and model where several go by one name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([^\t:\n]+?)\s*:\s*(.+)$", text, re.MULTILINE))
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name}, family {fields['cpu family']}, model {fields['model']}" if "cpu family" in fields else name


def versions() -> dict[str, str]:
    """Versions of what takes part; "not installed" for what does not."""
    out: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def resident() -> tuple[int, int]:
    """(bytes resident now, the most that ever were) of this process.

    Linux's VmHWM belongs to the program that runs; `ru_maxrss`, which stands in elsewhere, also counts what the parent held when it
    started this process.
    """
    try:
        status = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
        return int(status["VmRSS"]) << 10, int(status["VmHWM"]) << 10
    except (OSError, KeyError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return most, most


def timestamp() -> str:
    """Now, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
