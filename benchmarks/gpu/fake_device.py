"""A process that believes in one H200: how far a step comes on a machine without a GPU, up to its first allocation.

``gpu.py --dry-run`` uses it.  Everything is imported, all configuration is read, what only a GPU runs is chosen; the
first tensor on the device ends the step.  The driver's library is a stub, NVML and Triton's driver are replaced.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: What torch says, by build and place, where a tensor would be allocated on a device that is not there.
NO_DEVICE = (
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Torch not compiled with CUDA enabled",
    "no CUDA-capable device is detected",
    "Cannot get CUDA generator without ATen_cuda library",
    "is not available on this build",
    "only 0 devices",
    "out of bounds for 0 devices",
    "Invalid device argument",
    "CUDA driver initialization failed",
    "CUDA error",
)
CAPABILITY, MEMORY, PROCESSORS = (9, 0), 141 << 30, 132


def end_of_dry_run(error: BaseException) -> str | None:
    """Return where a step first asked for the device; None if it failed for another reason.

    vLLM raises errors from errors: the one that says that there is no device may come after others.
    """
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if any(text in str(found) for text in NO_DEVICE):
            frames = [frame for frame in traceback.extract_tb(found.__traceback__) if "torch" not in frame.filename]
            names = [f"{Path(frame.filename).name}:{frame.name}" for frame in frames]
            return " > ".join(names[-3:])
        seen.append(found)
        found = found.__cause__ or found.__context__
    return None


def install() -> None:
    """Make this process believe in the device; to be called before vLLM is imported."""
    _load_stub_driver()
    _fake_torch()
    _fake_triton()
    _fake_nvml()


def _load_stub_driver() -> None:
    """Load a ``libcuda.so.1`` with the symbols that vLLM's objects need; each call answers "no device"."""
    spec = find_spec("vllm")
    objects = list(Path(spec.origin).parent.rglob("*.so")) if spec is not None and spec.origin else []
    names = {"cuInit"}
    for file in objects:
        shown = subprocess.run(["nm", "-D", "--undefined-only", file], capture_output=True, text=True, check=True)
        names |= {word for word in shown.stdout.split() if word.startswith("cu") and word[2:3].isupper()}
    folder = Path(tempfile.mkdtemp())
    (folder / "stub.c").write_text("".join(f"int {name}() {{ return 100; }}\n" for name in sorted(names)))
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, folder / "stub.c"]
    subprocess.run(command, check=True, capture_output=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _fake_torch() -> None:
    import torch

    properties = SimpleNamespace(
        name="fake H200", total_memory=MEMORY, multi_processor_count=PROCESSORS, major=CAPABILITY[0],
        minor=CAPABILITY[1], warp_size=32, L2_cache_size=60 << 20, gcnArchName="", uuid="fake",
    )  # fmt: skip
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "_device_count_nvml": lambda: 1,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_name": lambda *_: properties.name,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)


def _fake_triton() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            is_active=lambda: True,
        )
    )


def _fake_nvml() -> None:
    """Replace NVML in the copy that vLLM brings; without vLLM there is nothing to do."""
    if find_spec("vllm") is None or find_spec("vllm.third_party.pynvml") is None:
        return
    import vllm.third_party.pynvml as pynvml

    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": CAPABILITY,
        "nvmlDeviceGetUUID": "fake",
        "nvmlDeviceGetName": "fake H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=MEMORY, free=MEMORY, used=0),
        "nvmlDeviceGetNumaNodeId": 0,
        "nvmlSystemGetDriverVersion": "580.0",
    }
    for name, result in answers.items():
        setattr(pynvml, name, lambda *_, result=result, **__: result)
    assert sys.modules["vllm.third_party.pynvml"] is pynvml
