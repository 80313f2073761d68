"""Client of ``vllm_specplug.vllm.probes.step_probe``, which times the steps of an engine in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_specplug.utils.environment import end_of_log, engine_environment


class StepProbe:
    """Starts the engine process and sends it requests, one JSON line each."""

    def __init__(self, model: str, speculative_config: dict[str, Any] | None, **engine: Any):
        self._log = tempfile.NamedTemporaryFile(prefix="specplug-step-", suffix=".log")  # noqa: SIM115
        stock = speculative_config is None or speculative_config["method"] == "ngram"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_specplug.vllm.probes.step_probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=engine_environment(kv_gib=1, plugins=not stock),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        arguments = {"model": model, "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 4}
        arguments |= {"enable_prefix_caching": False, **engine}
        self.ask(arguments | ({} if speculative_config is None else {"speculative_config": speculative_config}))

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the reply.

        Raises:
            RuntimeError: the engine has ended; the message holds the end of its log.
        """
        self._input.write(json.dumps(message) + "\n")
        self._input.flush()
        line = self._output.readline()
        if not line:
            raise RuntimeError(f"the engine has ended; {end_of_log(Path(self._log.name))}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._input.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
