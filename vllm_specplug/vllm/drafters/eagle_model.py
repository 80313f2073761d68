"""EAGLE-1/2/HASS drafters in vLLM: its own model plus ``fc.bias`` and draft vocabularies."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM

from vllm_specplug.config import model_drafter
from vllm_specplug.cpu.drafters.int8_linear import quantise_layers


class SpecPlugEagleForCausalLM(EagleLlamaForCausalLM):
    """vLLM's EAGLE model; ``d2t`` is read here, and the LM head's rows come from the target."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = vllm_config.speculative_config.draft_model_config.hf_config
        has_bias = getattr(config, "bias", True)
        config.bias = False  # with ``bias`` vLLM would also give the attention biases, and not load them
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        #: Offsets ``[draft_vocab]`` from draft to target token ids; None: the drafter has the target's vocabulary.
        self.d2t: torch.Tensor | None = None
        if has_bias:
            hidden_size = self.config.hidden_size
            self.model.fc = ReplicatedLinear(
                input_size=2 * hidden_size,
                output_size=hidden_size,
                bias=True,
                params_dtype=vllm_config.model_config.dtype,
                prefix=f"{prefix}.model.fc" if prefix else "model.fc",
                return_bias=False,
            )
            # A checkpoint may say `bias` (the default) and contain none.
            self.model.fc.bias.data.zero_()
        if model_drafter(vllm_config.speculative_config.specplug).draft_int8:
            quantise_layers(self, parts={"fc": 2})  # embeddings, and hidden states of another scale

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]):
        def taken(pairs):
            for name, weight in pairs:
                name = name.removeprefix("model.")
                if name == "d2t":
                    self.d2t = weight.to(torch.int64)
                elif name != "t2d":
                    yield name, weight

        return super().load_weights(taken(weights))
