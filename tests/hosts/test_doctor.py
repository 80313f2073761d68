"""``specplug doctor`` on the reference host."""

import json
import subprocess
import sys


def test_the_plugin_is_active_here():
    command = [sys.executable, "-m", "vllm_specplug.cli", "doctor", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    findings = {finding["name"]: finding for finding in json.loads(process.stdout)}
    assert [finding["blocks"] for finding in findings.values() if finding["blocks"]] == []
    assert process.returncode == 0
    assert findings["host"]["value"].startswith("vllm")
    assert findings["runner"]["value"].startswith("V1")
