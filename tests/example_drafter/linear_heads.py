"""A drafter with weights as a package of its own: two linear maps from the target's hidden state to the next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from vllm_specplug.config import ConfigError, TreeOptions, require_string
from vllm_specplug.core.tree import static_tree
from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo, as_draft
from vllm_specplug.types import Draft

#: Two children of the root, and one child of each of them.
PARENTS = (0, 0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class LinearHeadsOptions(TreeOptions):
    """Options of ``{"method": "linear_heads"}``; ``model`` is a directory with ``heads.safetensors``."""

    method: ClassVar[str] = "linear_heads"

    model: str
    num_speculative_tokens: int = len(PARENTS)
    draft_depth: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_string("model", self.model)


class LinearHeads:
    """Drafts one and two tokens behind the root (``proposer.Heads``)."""

    num_levels = 2

    def __init__(self, options: LinearHeadsOptions, target: TargetInfo):
        self._options, self._dtype = options, target.dtype

    def load(self, target_model: torch.nn.Module) -> None:
        weight = load_file(Path(self._options.model) / "heads.safetensors")["weight"]
        self._weight = weight.to(target_model.lm_head.weight.device, self._dtype)

    def draft(
        self, root_token_ids: torch.Tensor, hidden: torch.Tensor, sampling: Any = None, min_node_value: float = 0.0
    ) -> Draft:
        first, second = (hidden @ weight.T for weight in self._weight)
        second = second.argmax(dim=1, keepdim=True)
        tokens = torch.cat([first.topk(2).indices, second, second], dim=1)
        return as_draft(static_tree(root_token_ids, tokens, PARENTS))


def configure(options: LinearHeadsOptions, target: TargetInfo) -> DrafterConfig:
    """Check the weights against the target."""
    path = Path(options.model) / "heads.safetensors"
    if not path.is_file():
        raise ConfigError(f"model={options.model!r} has no heads.safetensors: give the directory that holds it")
    found, expected = tuple(load_file(path)["weight"].shape), (2, target.vocab_size, target.hidden_size)
    if found != expected:
        raise ConfigError(f"{path}: weight is {found}, this target needs {expected}: use heads made for this target")
    return DrafterConfig(options)


METHOD = Method("linear_heads", LinearHeadsOptions, model=ModelDrafter(configure, heads="linear_heads:LinearHeads"))
