"""What ``specplug doctor`` asks the installed vLLM: its platform, its model runner, and the symbols that we need.

The answers need vLLM's modules, whose import takes several seconds.  On a CPU they are therefore kept in the user's
cache.  The file's name is a digest of everything that the answers depend on, see :func:`_digest`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from vllm_specplug.hosts.compat import check
from vllm_specplug.utils.environment import cpu_name, version_of
from vllm_specplug.utils.files import replacing


@dataclass(frozen=True)
class Installation:
    """What vLLM says on this machine.

    Attributes:
        platform: class name of vLLM's platform.
        kind: ``cpu``, ``cuda`` or ``other``.
        runner: model runner of an ordinary model, ``V1`` or ``V2``.
        why: why vLLM chooses this runner.
        problems: the version is too old, or symbols are missing or differ; empty if the plugin can be active.
    """

    platform: str
    kind: str
    runner: str
    why: str
    problems: tuple[str, ...]


def find_platform() -> tuple[str, str]:
    """Return the name of vLLM's platform, and its kind: ``cpu``, ``cuda`` or ``other``."""
    from vllm.platforms import current_platform

    kind = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else "other"
    return type(current_platform).__name__, kind


def find_runner() -> tuple[str, str]:
    """Return the model runner of an ordinary model, ``V1`` or ``V2``, and the reason."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    forced = envs.VLLM_USE_V2_MODEL_RUNNER
    if forced is not None:
        return ("V2" if forced else "V1"), f"VLLM_USE_V2_MODEL_RUNNER={int(forced)}"
    return ("V2", "Triton is present") if HAS_TRITON else ("V1", "no Triton backend for this platform")


def examine() -> Installation:
    """Return what vLLM says here: the kept answers if nothing has changed, else those of :func:`examine_by_import`."""
    path = _folder() / f"{_digest()}.json"
    if (kept := _read(path)) is not None:
        return kept
    found = examine_by_import()
    # With a GPU the answer also depends on the driver.  Problems are not kept: the user is about to mend them.
    if found.kind == "cpu" and not found.problems:
        _save(path, found)
    return found


def examine_by_import() -> Installation:
    """Import vLLM, and return what it says here."""
    name, kind = find_platform()
    runner, why = find_runner()
    problems = check.check_runner(runner, kind == "cpu").problems
    return Installation(name, kind, runner, why, tuple(problems))


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-specplug" / "doctor"


def _digest() -> str:
    """Return a digest of what the answers depend on.

    The folder that contains vLLM changes its time with each package that pip installs or removes there.
    """
    spec = find_spec("vllm")
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    files = (origin, origin.parents[1]) if origin is not None else ()
    depends_on = [
        sys.version,
        sys.path,
        platform.node(),
        cpu_name(),
        check.find_vllm(),
        [version_of(name) for name in ("vllm-specplug", "torch", "triton", "transformers", "numpy")],
        [(str(file), file.stat().st_mtime_ns) for file in files],
        repr((check.OLDEST, check.MANIFEST, check.MANIFEST_V1_CUDA, check.MANIFEST_V2)),
        sorted((k, v) for k, v in os.environ.items() if k.startswith(("VLLM_", "CUDA_VISIBLE", "TRITON_"))),
    ]
    return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:16]


def _read(path: Path) -> Installation | None:
    try:
        found = Installation(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.kind == "cpu" and not found.problems else None


def _save(path: Path, found: Installation) -> None:
    """Write the answers; a folder that is read-only costs the next call's time only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(found)))
    except OSError:
        pass
