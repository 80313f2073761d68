"""Draft methods, one package each (imported as ``vllm_specplug.proposers``)."""
