"""Install the two patches that every process needs; all other code subclasses or registers with vLLM."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_specplug.config import ConfigError, is_our_method, nearest, shipped_drafters, unknown_method
from vllm_specplug.proposer import loadable_methods, method_names
from vllm_specplug.vllm.check import check_version
from vllm_specplug.vllm.patches import Patch, apply_all


def _wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(self, target_model_config, target_parallel_config):
        given = dict(self.speculative_config or {})
        for key, value in (
            ("method", self.spec_method),
            ("model", self.spec_model),
            ("num_speculative_tokens", self.spec_tokens),
        ):
            if value is not None:
                given.setdefault(key, value)
        if not is_our_method(given.get("method")):
            _check_others(given)
            return original(self, target_model_config, target_parallel_config)
        from vllm_specplug.vllm.speculative_config import build

        return build(given, target_model_config, target_parallel_config, self)

    return create_speculative_config


def _check_others(given: dict[str, Any]) -> None:
    """Refuse a misspelt method of ours, and a drafter of ours without a method, before vLLM asks a model hub for it.

    Raises:
        ConfigError: naming the method that was meant.
    """
    from typing import get_args

    from vllm.config.speculative import SpeculativeMethod

    method, model = given.get("method"), given.get("model")
    if isinstance(method, str) and method not in get_args(SpeculativeMethod) and nearest(method, method_names()):
        raise unknown_method(method)
    if method is None and isinstance(model, str):
        serving = [name for name in loadable_methods() if model in shipped_drafters(name)]
        if serving:
            raise ConfigError(
                f"{model!r} is a drafter of vllm-specplug: add the key 'method', one of {', '.join(serving)}"
            )


def _wrap_validate_spec_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_spec_decode(self, speculative_config):
        # Our walk runs vLLM's whole sampler at every node, so min_p and logit_bias work as in plain decoding.
        options = getattr(speculative_config, "specplug", None)
        if options is not None:
            from vllm.exceptions import VLLMValidationError

            from vllm_specplug.core.request_args import check_request

            try:
                return check_request(self.extra_args, options)
            except ConfigError as error:  # vLLM's own class is answered with status 400 and the message
                raise VLLMValidationError(str(error)) from error
        return original(self, speculative_config)

    return _validate_spec_decode


PATCHES = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs",
        attribute="create_speculative_config",
        parameters=("self", "target_model_config", "target_parallel_config"),
        reason="vLLM's list of methods is fixed, and it builds its own class",
        wrap=_wrap_create_speculative_config,
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams",
        attribute="_validate_spec_decode",
        parameters=("self", "speculative_config"),
        reason="vLLM refuses min_p and logit_bias with every speculative config",
        wrap=_wrap_validate_spec_decode,
    ),
)


def install() -> list[str]:
    """Apply the patches if this version of vLLM is accepted; return the problems otherwise."""
    problems = check_version().problems or apply_all(PATCHES)
    if not problems:
        _log_with_vllm()
    return problems


def _log_with_vllm() -> None:
    """Make our log lines a part of vLLM's: same place, format and level, also when vLLM sets these up later."""
    ours = logging.getLogger("vllm_specplug")
    ours.parent = logging.getLogger("vllm")
    ours.setLevel(ours.level)  # forgets which levels were enabled under the former parent
