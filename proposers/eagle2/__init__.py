"""EAGLE-2: a feature-level drafter whose tree follows its own confidence."""

from vllm_specplug.config import Eagle2Options
from vllm_specplug.proposer import Method

METHOD = Method("eagle2", Eagle2Options)
