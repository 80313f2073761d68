"""A tiny Qwen2-VL: a target with M-RoPE positions that reads images, with the files of its processor."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from vllm import ModelRegistry

from tests.doubles import architectures, tiny

#: Ids of the special tokens, the last of the vocabulary.
VISION_START, VISION_END, IMAGE, VIDEO = range(tiny.VOCAB - 4, tiny.VOCAB)
NAMES = {
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
}
PATCH, MERGE = 4, 2

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": tiny.HIDDEN,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "in_channels": 3,
}

VISION_35 = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [],
}


def vllm_module(module: str = "qwen2_vl", names: tuple[str, ...] = ("Qwen2VLForConditionalGeneration",)) -> ModuleType:
    """Import a multi-modal model of vLLM, and register its classes.

    It imports the video part of transformers, which needs torchvision; a CPU's environment may lack that, and images
    do not need it.
    """
    parts = [".".join(["torchvision", "transforms", "v2", "functional"][: i + 1]) for i in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("torchvision") is None:
            modules = [ModuleType(name) for name in parts]
            for outer, inner in zip(modules, modules[1:], strict=False):
                setattr(outer, inner.__name__.rpartition(".")[2], inner)
            for one in modules:
                patch.setitem(sys.modules, one.__name__, one)
        found = import_module(f"vllm.model_executor.models.{module}")
    for name in names:
        ModelRegistry.register_model(name, getattr(found, name))  # else another process would import it
    return found


def write_target(path: Path) -> Path:
    """The text part of ``tiny.write_target`` with the vision part of Qwen2-VL, its embeddings as large as a text's."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tiny.write_target(path, family="qwen2")
    text = json.loads((path / "config.json").read_text())
    text |= {"rope_parameters": ROPE}
    config = Qwen2VLConfig(
        text_config={name: value for name, value in text.items() if name not in ("architectures", "model_type")},
        vision_config=VISION,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        architectures=["Qwen2VLForConditionalGeneration"],
        torch_dtype="float32",
    )
    config.save_pretrained(path)
    torch.manual_seed(0)
    vision = Qwen2VLForConditionalGeneration(config).model.visual.state_dict()
    vision["merger.mlp.2.weight"] = torch.randn_like(vision["merger.mlp.2.weight"]) * 2
    tensors = load_file(path / "model.safetensors") | {f"visual.{name}": one for name, one in vision.items()}
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    _write_processor(path)
    return path


def write_qwen35(path: Path, experts: dict[str, Any]) -> Any:
    """Save a random Qwen3.5, dense or with experts, and return it; its vision part is not served."""
    kind = "Qwen3_5Moe" if experts else "Qwen3_5"
    vllm_module("qwen3_5", (f"{kind}ForConditionalGeneration",))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**architectures.COMMON, **architectures.GATED_DELTA, "rope_parameters": rope, **experts},
        vision_config={**VISION_35, "out_hidden_size": tiny.HIDDEN},
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config, dtype=torch.float32)
    architectures.scatter(model, architectures.ARCHITECTURES["Qwen3.5"], torch.Generator().manual_seed(0))
    model.eval().save_pretrained(path)
    return model


def _write_processor(path: Path) -> None:
    tiny.write_tokenizer(path)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token_id, name in NAMES.items():
        known = tokenizer["model"]["vocab"]
        known[name] = known.pop(f"<unused{token_id}>")
        special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        tokenizer["added_tokens"].append({"id": token_id, "content": name, **special})
    file.write_text(json.dumps(tokenizer))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        # vLLM 0.30 loads the processor where one of these is missing, and with it the videos' part.
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))


def image(seed: int, width: int = 32, height: int = 24) -> Image.Image:
    """Noise; as tokens it is ``width * height / 64``."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def prompt_with_images(token_ids: list[int], *images: Image.Image) -> dict[str, Any]:
    """A prompt whose images stand one behind the other, in the middle of its tokens."""
    middle = len(token_ids) // 2
    places = [VISION_START, IMAGE, VISION_END] * len(images)
    return {
        "prompt_token_ids": [*token_ids[:middle], *places, *token_ids[middle:]],
        "multi_modal_data": {"image": list(images)},
    }


def make_processor(path: Path) -> Any:
    """The processor of ``write_target`` without its videos: they need torchvision, which a CPU may lack."""
    from transformers import AutoTokenizer, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.processing_utils import VideosKwargs

    class NoVideos:
        valid_kwargs = VideosKwargs

    class ImagesOnly(Qwen2VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None

    pictures, tokenizer = Qwen2VLImageProcessorPil.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    return ImagesOnly(pictures, tokenizer, NoVideos())
