"""EAGLE-2: a feature-level drafter whose draft tree follows its own confidence (EAGLE-2, section 4)."""

from vllm_specplug.config import Eagle2Options
from vllm_specplug.proposer import Method

METHOD = Method("eagle2", Eagle2Options)
