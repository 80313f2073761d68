"""HASS: EAGLE-2's drafter and trees, with a training on the drafter's own features and likeliest tokens."""

from vllm_specplug.config import HassOptions
from vllm_specplug.proposer import Method
from vllm_specplug.proposers.eagle2 import EAGLE

METHOD = Method("hass", HassOptions, model=EAGLE)
