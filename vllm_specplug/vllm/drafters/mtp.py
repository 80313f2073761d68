"""MTP layers in a target's checkpoint: what vLLM makes of the target's config."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

from vllm.config import SpeculativeConfig

from vllm_specplug.config import ConfigError, TreeOptions

logger = logging.getLogger("vllm_specplug")

#: Questions to vLLM's config whether the MTP layers have a drafter class of their own, with other forwards.
_OWN_CLASSES = ("use_gemma4_mtp", "use_step3p5_mtp")


def fit_modules(options: TreeOptions, target: Any) -> TreeOptions:
    """Check that the target has MTP layers, and lower the number of nodes to a multiple of them, as vLLM asks for.

    Args:
        options: of the method.
        target: vLLM's config of the target.

    Raises:
        ConfigError: it has none that vLLM serves.
    """
    drafter = SpeculativeConfig.hf_config_override(copy.deepcopy(target.hf_config))
    num_modules = getattr(drafter, "n_predict", None) or 0
    if num_modules < 1:
        raise ConfigError(
            f"method {options.method!r}: vLLM finds no MTP layers in {target.model!r} (architectures "
            f"{target.hf_config.architectures}): use a model that has some, or the method eagle2, medusa or lookup"
        )
    nodes = options.num_speculative_tokens
    fitting = max(nodes - nodes % num_modules, num_modules)
    if num_modules > 1:
        logger.info("the first of %d MTP modules drafts trees of up to %d nodes", num_modules, fitting)
    return replace(options, num_speculative_tokens=fitting)


def check_class(config: SpeculativeConfig) -> None:
    """Refuse MTP layers that vLLM runs in another way than an EAGLE head.

    Raises:
        ConfigError: naming vLLM's method.
    """
    if any(ask() for name in _OWN_CLASSES if (ask := getattr(config, name, None)) is not None):
        raise ConfigError(
            f"no trees are drafted from the MTP layers of {config.target_model_config.model!r}, which vLLM runs in a "
            "way of their own: vLLM's own method 'mtp' drafts chains from them"
        )
