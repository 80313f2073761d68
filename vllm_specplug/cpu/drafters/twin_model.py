"""Another version's weights for a drafter that serves: read and checked beside the steps, exchanged between two.

A twin of vLLM's draft model has the same modules with parameters of its own.  vLLM's loader fills them and its layers
pack them, as at start.  Then the contents of both models' tensors are exchanged: compiled code keeps its tensors, and
the twin keeps the old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from vllm_specplug.cpu.row_linear import row_linear_layers
from vllm_specplug.proposers.eagle2.checkpoint import CheckpointError


class TwinModel:
    """A copy of a draft model with other weights.

    Args:
        model: vLLM's draft model.
        shared: the target's parameters, which the draft model may use too; they are never written.
        state: tensors of the checkpoint.

    Attributes:
        model: the twin; it does not run.
    """

    def __init__(self, model: torch.nn.Module, shared: set[int], state: dict[str, torch.Tensor]):
        self._pairs: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        self.model = self._twin_of(model, shared, {})
        own = {name for name, module in model.named_modules() if not _is_shared(module, shared)}
        if "embed_tokens.weight" in state and "model.embed_tokens" not in own:
            state = dict(state)
            _check_same_embedding(model.model.embed_tokens, state.pop("embed_tokens.weight"))
        with torch.no_grad():
            self.model.load_weights(iter(state.items()))

    def _twin_of(self, module: torch.nn.Module, shared: set[int], known: dict[int, Any]) -> torch.nn.Module:
        if id(module) in known:
            return known[id(module)]
        if _is_shared(module, shared):
            return torch.nn.Module()  # a weight for it is refused by the loader
        twin = known[id(module)] = object.__new__(type(module))
        twin.__dict__ = dict(module.__dict__)
        twin._parameters = {
            name: _own_parameter(name, value, module, twin) for name, value in module._parameters.items()
        }
        twin._modules = {
            name: child if child is None else self._twin_of(child, shared, known)
            for name, child in module._modules.items()
        }
        self._pairs.append((module, twin))
        return twin

    @torch.no_grad()
    def pack(self) -> None:
        """Bring the twin's weights into the form that the module's were brought into at start."""
        for module, twin in self._pairs:
            method = getattr(twin, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                rows, dtype = getattr(module, "linear_rows", 0), getattr(module, "linear_dtype", None)
                try:
                    with row_linear_layers(rows, is_bounded=False, dtype=dtype):
                        method.process_weights_after_loading(twin)
                except ValueError as error:
                    raise CheckpointError(f"{type(module).__name__}: {error} Restart the server.") from None
            if len(list(_tensors_of(module))) != len(list(_tensors_of(twin))):
                raise CheckpointError(f"weights of {type(module).__name__} cannot be exchanged: restart the server.")

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the weights of both models; a second call brings the old ones back."""
        for module, twin in self._pairs:
            for tensor, other in zip(_tensors_of(module), _tensors_of(twin), strict=True):
                kept = tensor.clone()
                tensor.copy_(other)
                other.copy_(kept)


def _is_shared(module: torch.nn.Module, shared: set[int]) -> bool:
    return any(id(parameter) in shared for parameter in module._parameters.values())


def _own_parameter(name: str, value: Any, module: torch.nn.Module, twin: torch.nn.Module) -> Any:
    """Return a parameter for the twin, as it was before vLLM packed the module's."""
    if value is None:
        return None
    if (recorded := get_layerwise_info(module).restore_metadata[0].get(name)) is not None:
        fresh = materialize_meta_tensor(recorded)
    else:  # biases: made after vLLM's record
        fresh = torch.empty_like(value.data)
        fresh.__class__, fresh.__dict__ = value.__class__, value.__dict__.copy()
    if fresh.shape == value.shape:  # a checkpoint may leave it out
        fresh.data.copy_(value.data)
    for key, bound in fresh.__dict__.items():
        if isinstance(bound, MethodType) and bound.__self__ is module:
            fresh.__dict__[key] = bound.__func__.__get__(twin)
    return restore_layer_refs(fresh, twin)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a module's weights: parameters, and what vLLM's packing keeps elsewhere."""
    yield from (value.data for value in module._parameters.values() if value is not None and value.numel())
    if (quantised := getattr(module, "quantised", None)) is not None:
        yield from (quantised.packed, quantised.scales)
    elif isinstance(packed := getattr(module, "cpu_linear", None), Callable):
        for cell in getattr(packed, "__closure__", None) or ():
            held = getattr(cell.cell_contents, "handler_tensor", cell.cell_contents)
            if isinstance(held, torch.Tensor):
                yield held


def _check_same_embedding(embedding: torch.nn.Module, given: torch.Tensor) -> None:
    """Refuse an embedding in a checkpoint whose drafter shares the target's.

    Raises:
        CheckpointError: it differs from the target's.
    """
    weight, indices = getattr(embedding, "weight", None), getattr(embedding, "shard_indices", None)
    if weight is not None and indices is not None:
        rows = given[indices.org_vocab_start_index : indices.org_vocab_end_index].to(weight.dtype)
        if torch.equal(rows, weight[: len(rows)]):
            return
    raise CheckpointError(
        "embed_tokens.weight differs from the target's embedding, which the drafter in use shares: publish the weights "
        "without it, or restart the server."
    )
