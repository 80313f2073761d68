"""Reading, writing and validating draft-head checkpoints.

Two layouts are supported (h = hidden size, V = target vocabulary, D = draft vocabulary):

kind "eagle" (EAGLE-1, EAGLE-2, HASS)         kind "eagle3"
  fc.weight            [h, 2h]  embed | hidden   fc.weight            [h, n * target h], n aux layers, mostly 3
  fc.bias              [h]      optional         midlayer.{hidden_norm,input_layernorm,
  embed_tokens.weight  [V, h]   optional             post_attention_layernorm}.weight [h]
  layers.0.self_attn.{q,k,v,o}_proj.weight       midlayer.self_attn.{q,k,v,o}_proj.weight (q, k, v read 2h)
  layers.0.mlp.{gate,up,down}_proj.weight        midlayer.mlp.{gate,up,down}_proj.weight
  layers.0.post_attention_layernorm.weight [h]   norm.weight [h], lm_head.weight [D, h] (optional when D = V)
  d2t                  [D]      optional         d2t [D] (not when D = V), t2d [V] (optional)

Some exporters call the first layer of an EAGLE-3 head `layers.0` too: its kind follows from what its tensors compute,
see `kinds`. Further layers are `layers.{1,2,...}`, without `hidden_norm` and with q, k, v that read h. A head with
`self_attn.{q,k}_norm` has Qwen3 layers. A head that reads the target's last hidden state has no `fc`. `layout` has the
tensors that a config asks for, `plain_layout` reads the speculators format. `d2t` has offsets: target id = draft id +
d2t[draft id]. An "eagle" head with d2t scores only those D target ids, with their rows of the target's LM head. Weights
are safetensors files or the official `pytorch_model.bin`, in one file or in shards. `validate_checkpoint` reads only
headers and d2t, so it is fast enough to run before a server starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_specplug.utils.files import replacing

from .kinds import (
    MASK_STATE,
    PARALLEL_KEYS,
    SPECULATORS_KEY,
    CheckpointError,
    kind_of,
    name_of,
    reads_last_state,
    refuse_others,
)
from .kinds import num_layers as num_layers_in
from .layout import aux_layers, check_fields, check_names, expected_shapes, has_qwen3_layers, missing_hint
from .plain_layout import TARGETS, plain_config, plain_names

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
#: Pickled weights, of which only plain tensors are read; the second is Medusa's.
PICKLE_NAMES = ("pytorch_model.bin", "medusa_lm_head.pt")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(?:safetensors|bin)$", re.ASCII)


@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about a validated checkpoint, from its config and tensor headers."""

    path: Path
    kind: str  # "eagle" (also EAGLE-2 and HASS) or "eagle3"
    hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int  # ids the head can propose; equals vocab_size without a reduced vocabulary
    has_bias: bool
    has_embed_tokens: bool
    has_lm_head: bool
    has_d2t: bool
    # Of the target, whose inputs an EAGLE-3 head reads; none: its last hidden state; None: vLLM's default.
    aux_layers: tuple[int, ...] | None
    num_layers: int
    has_qwen3_layers: bool
    config: dict = field(repr=False)


def validate_checkpoint(
    path: str | os.PathLike,
    target_hidden_size: int,
    target_vocab_size: int,
    expected_kind: str | None = None,
    num_layers: int | None = None,
) -> CheckpointInfo:
    """Check that the head at `path` is complete, belongs to the target, and is of a kind that is served.

    Args:
        path: folder of the checkpoint.
        target_hidden_size, target_vocab_size: of the target.
        expected_kind: refuse other kinds.
        num_layers: of the target; None: not known, so that the layers that the head reads are not compared with it.

    Raises:
        CheckpointError: one line with the cause and the remedy.
    """
    path = Path(path)
    config, shapes = read_config(path), read_shapes(path)
    plain = _in_plain_layout(path, config, shapes)
    info = _check(path, *plain, (target_hidden_size, target_vocab_size), expected_kind, num_layers)
    names = [name for name in shapes if name.startswith(TARGETS)]
    if names and SPECULATORS_KEY in config:
        raise CheckpointError(
            f"{path} has tensors of the target, {', '.join(sorted(names))}, which vLLM does not load: "
            f"`specplug convert {path} --out DIR` makes a checkpoint without them."
        )
    return info


def validate_parallel(path: Path, target_hidden_size: int, target_vocab_size: int, num_layers: int) -> CheckpointInfo:
    """Check a P-EAGLE head as an EAGLE-3 head with a mask's hidden state beside it; see `validate_checkpoint`."""
    shapes = {name: shape for name, shape in read_shapes(path).items() if name != MASK_STATE}
    config = _as_eagle3(read_config(path))
    plain = _in_plain_layout(path, config, shapes)
    return _check(path, *plain, (target_hidden_size, target_vocab_size), "eagle3", num_layers)


def _as_eagle3(config: dict) -> dict:
    """Return the config of a P-EAGLE head as that of an EAGLE-3 head."""
    kept = {key: value for key, value in config.items() if key not in PARALLEL_KEYS}
    if SPECULATORS_KEY in kept:
        kept[SPECULATORS_KEY] = "eagle3"
    return kept | {"architectures": ["LlamaForCausalLMEagle3"]}  # vLLM's class follows from the tensors


def _check(
    path: Path,
    config: dict,
    shapes: dict[str, tuple[int, ...]],
    target_sizes: tuple[int, int],
    expected_kind: str | None,
    num_layers: int | None,
) -> CheckpointInfo:
    kind = kind_of(config, shapes)
    refuse_others(path, kind, config, shapes)
    if expected_kind is not None and kind != expected_kind:
        raise CheckpointError(
            f"{path} is {name_of(kind)} ({kind!r}), but {expected_kind!r} is needed here; give a head of that kind, "
            f"or choose the method that reads {kind!r} heads."
        )
    check_fields(path, config, kind, shapes, *target_sizes)
    layers: tuple[int, ...] | None = ()
    if kind == "eagle3" and not reads_last_state(config) and len(fused := shapes.get("fc.weight", ())) == 2:
        layers = aux_layers(path, config, fused[1], target_sizes[0], num_layers)
    expected = expected_shapes(config, kind, shapes, *target_sizes)
    check_names(path, config, kind, shapes, expected)
    check_tensors(
        path,
        shapes,
        expected,
        missing_hint=missing_hint(config, sorted(expected.keys() - shapes.keys()), *target_sizes),
        shape_hint="config.json and the weights do not belong together, or the head was trained for another target.",
    )
    return CheckpointInfo(
        path=path,
        kind=kind,
        hidden_size=config["hidden_size"],
        vocab_size=target_sizes[1],
        draft_vocab_size=check_draft_vocabulary(path, shapes, target_sizes[1]),
        has_bias="fc.bias" in shapes,
        has_embed_tokens="embed_tokens.weight" in shapes,
        has_lm_head="lm_head.weight" in shapes,
        has_d2t="d2t" in shapes,
        aux_layers=layers,
        num_layers=num_layers_in(shapes),
        has_qwen3_layers=has_qwen3_layers(shapes),
        config=config,
    )


def load_head(path: str | os.PathLike) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read the config and all tensors of a checkpoint in the plain layout; a leading `model.` is removed from names.

    The config of a P-EAGLE head becomes that of an EAGLE-3 head.
    """
    path = Path(path)
    config = read_config(path)
    state: dict[str, torch.Tensor] = {}
    for file in _weight_files(path):
        if file.suffix != ".safetensors":
            state.update((_plain(name), tensor) for name, tensor in _load_pickle(file).items())
            continue
        _read_safetensors_header(file)
        with _opened(file) as tensors:
            state.update((_plain(name), tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
    return _in_plain_layout(path, _as_eagle3(config) if MASK_STATE in state else config, state)


def save_head(path: str | os.PathLike, config: dict, state: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint: the weights, then config.json, each atomically, so that a config never lacks its weights."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with replacing(path / WEIGHTS_NAME) as weights:
        save_file(tensors, str(weights), metadata={"format": "pt"})
    with replacing(path / CONFIG_NAME) as text:
        text.write_text(json.dumps(config, indent=2) + "\n")


def read_config(path: Path) -> dict:
    """Read config.json of a checkpoint folder."""
    if not path.is_dir():
        hint = (
            "give the folder that holds config.json"
            if path.exists()
            else "check the path, or download it: hf download OWNER/NAME --local-dir DIR"
        )
        raise CheckpointError(f"Draft checkpoint {path} is not a folder: {hint}.")
    file = path / CONFIG_NAME
    if not file.is_file():
        raise CheckpointError(f"{path} has no config.json; copy the head's config.json next to its weights.")
    try:
        config = json.loads(file.read_text())
    except (
        ValueError,
        RecursionError,
    ) as error:  # ill-formed, not UTF-8, or with too large a number or too deep a nesting
        raise CheckpointError(f"{file} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must hold one JSON object, found {type(config).__name__}; fetch it again.")
    return config


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read all tensors' names and shapes; of a safetensors file only the header."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(path):
        if file.suffix != ".safetensors":
            shapes.update((_plain(name), tuple(tensor.shape)) for name, tensor in _load_pickle(file).items())
        else:
            header = _read_safetensors_header(file)
            shapes.update((_plain(name), tuple(entry["shape"])) for name, entry in header.items())
    return shapes


def read_head(path: Path) -> tuple[dict, dict[str, tuple[int, ...]]]:
    """Read the config, and the names and shapes of all tensors, in the plain layout."""
    return _in_plain_layout(path, read_config(path), read_shapes(path))


def _in_plain_layout(path: Path, config: dict, tensors: dict[str, Any]) -> tuple[dict, dict[str, Any]]:
    if SPECULATORS_KEY not in config:
        return config, tensors
    return plain_config(config, path), plain_names(tensors)


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """Target token id of each draft id: int64 [draft_vocab]."""
    return torch.arange(d2t.numel(), dtype=torch.int64, device=d2t.device) + d2t.to(torch.int64)


def offsets(ids: torch.Tensor) -> torch.Tensor:
    """The d2t tensor, int64 [draft_vocab], of the draft vocabulary `ids` (target ids)."""
    return ids.to(torch.int64) - torch.arange(ids.numel(), dtype=torch.int64)


# ---- files


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS_NAME).is_file():
        return [path / WEIGHTS_NAME]
    files = sorted(path.glob("*.safetensors")) or [path / name for name in PICKLE_NAMES if (path / name).is_file()]
    files = files or sorted(path.glob("pytorch_model-*-of-*.bin"))
    if not files:
        raise CheckpointError(
            f"{path} has no weights: neither {WEIGHTS_NAME} nor {PICKLE_NAMES[0]}; download the whole checkpoint."
        )
    _check_shards(path, files)
    return files


def _check_shards(path: Path, files: list[Path]) -> None:
    """Raise `CheckpointError` if one of the shards `NAME-1-of-3` to `NAME-3-of-3` is missing."""
    shards = [match for file in files if (match := _SHARD.search(file.name))]
    if shards and len(shards) < (count := max(int(match[2]) for match in shards)):
        raise CheckpointError(f"{path} has {len(shards)} of {count} shards of its weights; download the others too.")


def _read_safetensors_header(file: Path) -> dict[str, dict]:
    """Parse the header, and compare the file's size with the size that follows from it."""
    size = file.stat().st_size
    broken = CheckpointError(
        f"{file} is truncated or not a safetensors file ({size} bytes); download or export it again."
    )
    with open(file, "rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise broken
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise broken
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            numbers = [*ends, *(size for entry in header.values() for size in entry["shape"])]
            is_sound = all(isinstance(number, int) for number in numbers)
        # Valid JSON may not be a header: its entries can have other types or lack keys.
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
            raise broken from error
    if not is_sound or size != 8 + length + max(ends, default=0):
        raise broken
    return header


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged ({error}); download or export it again.") from error


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Read an official `.bin` or `.pt` file of plain tensors; a pickle that would run code is refused."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is a pickle with other objects than plain tensors and is refused, because loading it could run "
            f"code; convert it to {WEIGHTS_NAME} in an environment you trust: "
            f"safetensors.torch.save_file(torch.load(file, weights_only=False), ...)."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or not a torch file; download it again.") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{file} does not hold a plain dictionary of tensors; save the head's state_dict().")
    return state


def _read_tensor(path: Path, name: str) -> torch.Tensor:
    for file in _weight_files(path):
        if file.suffix != ".safetensors":
            state = {_plain(key): value for key, value in _load_pickle(file).items()}
            if name in state:
                return state[name]
            continue
        with _opened(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if _plain(key) == name:
                    return tensors.get_tensor(key)
    raise CheckpointError(f"{path} has no tensor {name!r}; export the checkpoint again.")


# ---- checks


def check_tensors(path: Path, found: dict, expected: dict, missing_hint: str, shape_hint: str) -> None:
    """Raise `CheckpointError` unless `found` has all `expected` names and shapes; the hints end the messages."""
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{path} lacks {len(missing)} tensor(s): {', '.join(missing)}; {missing_hint}")
    wrong = [
        f"{name} expected {list(shape)}, found {list(found[name])}"
        for name, shape in sorted(expected.items())
        if found[name] != shape
    ]
    if wrong:
        raise CheckpointError(f"{path} has tensors of the wrong shape: {'; '.join(wrong)}; {shape_hint}")


def check_draft_vocabulary(path: Path, shapes: dict[str, tuple[int, ...]], target_vocab_size: int) -> int:
    """Return the size of the draft vocabulary; raise `CheckpointError` if d2t does not map it into the target's."""
    if "d2t" not in shapes:
        return target_vocab_size
    if len(shapes["d2t"]) != 1:
        raise CheckpointError(f"{path}: d2t has the shape {list(shapes['d2t'])}, not [draft_vocab]; export it again.")
    ids = target_ids(_read_tensor(path, "d2t"))
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= target_vocab_size:
        raise CheckpointError(
            f"{path}: d2t points outside the target's vocabulary of {target_vocab_size}; it must have offsets "
            f"(target id - draft id), not target ids: export the head again."
        )
    if ids.unique().numel() != ids.numel():
        raise CheckpointError(f"{path}: d2t maps two draft ids to one target id; export the head again.")
    return ids.numel()
