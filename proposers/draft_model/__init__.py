"""A small model of the target's family drafts trees, level by level."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_specplug.config import ConfigError, GrownOptions, require_string
from vllm_specplug.proposer import DrafterConfig, Method, ModelDrafter, TargetInfo


@dataclass(frozen=True, kw_only=True)
class DraftTreeOptions(GrownOptions):
    """Options of ``{"method": "draft_tree"}``.

    Attributes:
        model: a language model with the target's vocabulary: a directory or a Hugging Face repository.
    """

    method: ClassVar[str] = "draft_tree"

    model: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require_string("model", self.model)


def configure(options: DraftTreeOptions, target: TargetInfo) -> DrafterConfig:
    """Check that a folder has a language model; vLLM loads it, and fetches a repository."""
    folder = Path(options.model).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return DrafterConfig(options, "draft_model", str(folder))
    if folder.is_absolute() or options.model.startswith(".") or options.model.count("/") != 1:
        raise ConfigError(
            f"drafter {options.model!r} does not exist: give a directory with config.json and weights, or a Hugging "
            "Face repository (owner/name)"
        )
    return DrafterConfig(options, "draft_model", options.model)


def _check_folder(folder: Path) -> None:
    """Refuse draft heads; whether the vocabulary fits is known when vLLM has read the tokenizers.

    Raises:
        CheckpointError: with the kind, and what serves it.
    """
    from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError, read_config, read_shapes
    from vllm_specplug.proposers.eagle2.kinds import kind_of, name_of, served_by

    config, shapes = read_config(folder), read_shapes(folder)
    if (kind := kind_of(config, shapes)) not in ("model", "mtp", "unknown"):
        raise CheckpointError(
            f"{folder} is {name_of(kind)}, and the method 'draft_tree' drafts with a whole language model: "
            f"{served_by(kind)}"
        )


METHOD = Method(
    "draft_tree",
    DraftTreeOptions,
    model=ModelDrafter(
        configure,
        v1="vllm_specplug.cpu.drafters.draft_model:TreeDraftModelProposer",
        v2="vllm_specplug.gpu.drafters.draft_model:TreeDraftModelSpeculator",
        is_vllm_model=True,
    ),
)
