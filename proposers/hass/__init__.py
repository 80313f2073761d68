"""HASS: EAGLE-2's drafter and trees, trained on its own features and for the tokens that drafting needs."""

from vllm_specplug.config import HassOptions
from vllm_specplug.proposer import Method
from vllm_specplug.proposers.eagle2 import EAGLE

METHOD = Method("hass", HassOptions, model=EAGLE)
