"""What tests know of the host's versions."""

from __future__ import annotations

from packaging.version import Version

from vllm_specplug.vllm.check import find_vllm

VERSION = Version(find_vllm()[1])

#: The noise of the host's sampler is a function of seed and token; drafts are the likeliest tokens elsewhere.
NOISE_IS_KNOWN = Version("0.32") <= VERSION

#: Behind a stop string the host drops the rest of a step; older ones drop its text only, with any speculative method.
DROPS_TOKENS_BEHIND_STOPS = Version("0.32") <= VERSION

#: Older hosts lose track of which request's ``allowed_token_ids`` are masked where, once requests move in their batch.
MASKS_ALLOWED_TOKENS_OF_EACH_REQUEST = Version("0.31") <= VERSION

#: Older CPU operators take attention sinks in bfloat16 only, so that plain vLLM fails with gpt-oss in float32.
TAKES_FLOAT32_SINKS = Version("0.31") <= VERSION

#: On 0.30, 2 of 72 sampled answers of a GPTQ target in bfloat16 differed from plain vLLM's, likely by rounding.
SAMPLES_GPTQ_EXACTLY = Version("0.31") <= VERSION

#: Without a Triton for CPUs, vLLM 0.30 fails in its own rejection sampler, with its n-gram speculation and no plugin.
SPECULATES_ON_CPUS = Version("0.31") <= VERSION or Version("0.30") > VERSION

#: After a step in which no request can use drafts (chunks of prompts), V2 drafts nothing.
SKIPS_DRAFTS = Version("0.33") <= VERSION


def comparable(found: list, expected: list, has_stop_strings: bool) -> list:
    """Tokens (or their logprobs) found, without those that this host hands out behind a stop string."""
    return found if DROPS_TOKENS_BEHIND_STOPS or not has_stop_strings else found[: len(expected)]
