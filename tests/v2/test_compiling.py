"""The Triton kernels compile for GPUs: the interpreter runs what the compiler refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: Bytes that a program can have, by compute capability.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: Bytes that a thread may spill.
MAX_SPILLED = 128
CASES = ("plain", "traits")
#: All kernels that are launched, by their names.
KERNEL = r"@triton\.jit.*\s*def _(\w+_kernel)\("
#: Of a test that is not wide, as in ``compile_kernels``: the one with the least shared memory.
FEW = {120}


@pytest.mark.parametrize("gpus", [FEW, pytest.param({*SHARED_MEMORY}, marks=pytest.mark.wide)], ids=["few", "all"])
def test_every_launch_compiles_and_fits(pytestconfig, gpus):
    """What has not changed since the last run is read from Triton's cache, which knows sources and versions."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.v2.compile_kernels", "--json", *(["--wide"] if gpus != FEW else [])],
        env={**environment, "TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton"))},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    sources = [file.read_text() for file in (root / "vllm_specplug").rglob("*.py")]
    assert {row["kernel"] for row in rows} == {name for text in sources for name in re.findall(KERNEL, text)}
    attention = {(row["sm"], row["head"], row["case"]) for row in rows if row["kernel"] == "tree_attention_kernel"}
    assert gpus == FEW or attention >= {(90, head, case) for head in (64, 128, 256) for case in CASES}
    assert attention >= {(sm, head, "traits") for sm in gpus for head in (128, 256)}
    by_kernel = {}
    for row in rows:
        by_kernel.setdefault(row["kernel"], set()).add(row["sm"])
    in_16_bits = {"tree_attention_kernel", "continue_kernel", "merge_kernel"}
    assert all(by_kernel[name] == gpus for name in set(by_kernel) - in_16_bits)
    assert all(row["vectors"] > 0 for row in rows if row["kernel"] == "move_rows_kernel")
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["sm"]], row
        assert row["spilled"] <= MAX_SPILLED, row
