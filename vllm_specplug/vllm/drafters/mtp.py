"""MTP layers in a target's checkpoint: what vLLM makes of the target's config."""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm import ModelRegistry
from vllm.config import SpeculativeConfig

from vllm_specplug.config import ConfigError, TreeOptions
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, read_shapes

logger = logging.getLogger("vllm_specplug")

_LAYER = re.compile(r"\blayers\.(\d+)\.")
#: Types of config whose layers vLLM runs in a way of their own; the V1 runner has adapters for them.
_OWN_TYPES = ("step3p5_mtp", "gemma4_mtp")
#: Package of vLLM's models with kernels of their own for each kind of device.
_DEVICE_MODELS = "vllm.models."


def fit_modules(options: TreeOptions, target: Any, v2: bool = False) -> TreeOptions:
    """Check that the target has MTP layers, and lower the number of nodes to a multiple of them, as vLLM asks for.

    Args:
        options: of the method.
        target: vLLM's config of the target.
        v2: whether the V2 runner serves it.

    Raises:
        ConfigError: it has none that vLLM serves, or none that draft trees.
    """
    num_modules = _num_modules(target)
    if num_modules < 1:
        raise ConfigError(
            f"method {options.method!r}: vLLM finds no MTP layers in {target.model!r} (architectures "
            f"{target.hf_config.architectures}): use a model that has some, give their own checkpoint as 'model' "
            "(Gemma 4), or use the method eagle2, medusa or lookup"
        )
    _check(_drafter_config(target), target.model, v2, target.use_mla)
    if not _has_weights(target):
        raise ConfigError(
            f"method {options.method!r}: the config of {target.model!r} names MTP layers, but the checkpoint has no "
            "weights of them: use a checkpoint with them, or the method eagle2, medusa or lookup"
        )
    nodes = options.num_speculative_tokens
    fitting = nodes - nodes % num_modules if nodes > num_modules else nodes
    if num_modules > 1:
        logger.info("the first of %d MTP modules drafts trees of up to %d nodes", num_modules, fitting)
    return replace(options, num_speculative_tokens=fitting)


def has_layers(target: Any, v2: bool = False) -> bool:
    """Return whether a target, vLLM's config of it, has MTP layers that draft trees on a runner."""
    try:
        is_refused = _problem(_drafter_config(target), v2, target.use_mla) is not None
        return not is_refused and _num_modules(target) > 0 and _has_weights(target)
    except (AttributeError, AssertionError, KeyError, TypeError, ValueError):  # vLLM expects a target that has some
        return False


def _drafter_config(target: Any) -> Any:
    return SpeculativeConfig.hf_config_override(copy.deepcopy(target.hf_config))


def _num_modules(target: Any) -> int:
    drafter = _drafter_config(target)
    found = getattr(drafter, "n_predict", None)
    if found is None and drafter.model_type != target.hf_config.model_type:  # some classes read the text part only
        found = getattr(drafter.get_text_config(), "num_nextn_predict_layers", None)
    return found or 0


def _has_weights(target: Any) -> bool:
    """Return whether a folder has tensors of MTP layers: named so, or of layers after the target's last one."""
    try:
        names = read_shapes(Path(target.model))
    except CheckpointError:  # a repository, or another format: vLLM reads it
        return True
    num_layers = getattr(target.hf_config.get_text_config(), "num_hidden_layers", 0)
    layers = (int(found[1]) for name in names if (found := _LAYER.search(name)))
    return any("mtp" in name for name in names) or any(layer >= num_layers for layer in layers)


def _problem(drafter: Any, v2: bool, use_mla: bool) -> str | None:
    """Return why no trees are drafted by the MTP layers of a drafter's config, or None."""
    if v2 and getattr(drafter, "model_type", None) in _OWN_TYPES:
        return "on this model runner vLLM runs them in a way of their own"
    if v2 and use_mla:
        return "on this model runner layers with MLA draft no trees"
    name = (getattr(drafter, "architectures", None) or [""])[0]
    module = getattr(ModelRegistry.models.get(name), "module_name", "")
    if module.startswith(_DEVICE_MODELS):
        return f"{name} attends with kernels of its own ({module}), which read no trees"
    return None


def check_class(config: Any) -> None:
    """Refuse MTP layers that vLLM runs in another way than an EAGLE head.

    Args:
        config: a ``TreeSpeculativeConfig``.

    Raises:
        ConfigError: naming vLLM's method.
    """
    drafter = config.draft_model_config
    _check(drafter.hf_config, config.target_model_config.model, config.v2_runner, drafter.use_mla)


def _check(drafter: Any, name: str, v2: bool, use_mla: bool) -> None:
    if (problem := _problem(drafter, v2, use_mla)) is not None:
        raise ConfigError(
            f"no trees are drafted from the MTP layers of {name!r}: {problem}; vLLM's own method 'mtp' drafts chains "
            "from them"
        )
