"""vLLM's server, whose engine and worker are forked: in new processes vLLM's imports take ten seconds and more each."""

import runpy

from vllm.utils import system_utils

from tests.doubles.forked import fork

if __name__ == "__main__":
    system_utils._maybe_force_spawn = fork
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
