"""The Triton kernels compile for GPUs: the interpreter runs what the compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

#: Bytes that a program can have, by compute capability.
SHARED_MEMORY = {"90": 227 << 10, "89": 99 << 10}


def test_every_launch_compiles_and_fits(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.v2.compile_kernels"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout)
    assert {name.split()[0] for name in compiled} == {
        "_tree_attention_kernel", "_continue_kernel", "_merge_kernel", "_store_trees_kernel", "_stage_rows_kernel",
        "_walk_rows_kernel", "_move_rows_kernel", "_match_keys_kernel",
    }  # fmt: skip
    for name, shared in compiled.items():
        assert max(shared) <= SHARED_MEMORY[name.split()[1]], name
