"""CUDA graphs without a GPU: a capture records operators and kernel launches, a replay runs them on the same memory.

As on a GPU, nothing runs during a capture, and memory of the pool holds anything before a replay and after it: here
NaN, and integers that are no index.  Only tensors that the captured code still holds keep their values after a replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.doubles.no_syncs import LOOKS


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``.

    Attributes:
        replays: of all graphs.
        pool: given when it was captured.
    """

    replays: ClassVar[int] = 0
    pool: Any = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.memory: list[torch.Tensor] = []
        #: Tensors of the record, by the storage that they share.
        self._aliases: dict[int, list[torch.Tensor]] = {}

    def replay(self) -> None:
        Graph.replays += 1
        with torch.inference_mode(), _disable_current_modes():
            self.poison(self.memory)
            for call in self.calls:
                call()
            self.poison([tensor for tensor in self.memory if not self._is_held(tensor)])

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same memory as another tensor; the caller's own can die."""
        alias = tensor.detach()
        self._aliases.setdefault(_storage(alias)._cdata, []).append(alias)
        return alias

    def poison(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_floating_point():
                torch.empty(0, dtype=tensor.dtype).set_(_storage(tensor)).fill_(torch.nan)
            else:
                _storage(tensor).fill_(1 if tensor.dtype == torch.bool else 0x6B)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        """Return whether anyone but this record has the memory."""
        key = _storage(tensor)._cdata
        wrappers = 1  # of the storage, in Python
        return torch._C._storage_Use_Count(key) > len(self._aliases[key]) + wrappers


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


class Capture(TorchDispatchMode):
    """Stands for ``torch.cuda.graph``.

    Attributes:
        active: the capture that runs.
    """

    active: ClassVar[Capture | None] = None

    def __init__(self, graph: Graph, pool: Any = None, stream: Any = None):
        super().__init__()
        self._graph, graph.pool = graph, pool

    def __enter__(self) -> Capture:
        assert Capture.active is None
        Capture.active = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        Capture.active = None
        self._graph.poison(self._graph.memory)

    def record(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``function`` at each replay, on the memory that its tensors have now."""
        with _disable_current_modes():
            args, kwargs = tree_map_only(torch.Tensor, self._graph.alias, (args, kwargs))
        self._graph.calls.append(partial(function, *args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        copies = name == "lift_fresh" and args[0].dim() > 0  # Python's values; a scalar is an argument of a kernel
        assert name not in LOOKS and not copies, f"{name} while a graph is captured"
        if func._schema.is_mutable:
            self.record(func, *args, **kwargs)
            return _written(func._schema, args, kwargs)
        known = {_storage(tensor)._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        result = func(*args, **kwargs)
        made = [one for one in tree_leaves(result) if torch.is_tensor(one) and _storage(one)._cdata not in known]
        if made:
            for one in made:
                _storage(one).fill_(0)  # a valid index, for the shapes of what follows
            self._graph.memory.extend(map(self._graph.alias, made))
            if not name.startswith(("empty", "new_empty")):
                self.record(_compute_again, func, result, args, kwargs)
        return result


def _written(schema: Any, args: tuple, kwargs: dict) -> Any:
    """Return what an operator returns that writes to its arguments."""
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    written = [
        given.get(one.name) for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write
    ]
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


def _compute_again(func: Any, result: Any, args: tuple, kwargs: dict) -> None:
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if torch.is_tensor(old):
            old.copy_(new)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a stand-in for a kernel, which writes to its arguments: a capture records its call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if Capture.active is None:
            return function(*args, **kwargs)
        return Capture.active.record(function, *args, **kwargs)

    return call


def capture_in_engines(patch: pytest.MonkeyPatch) -> None:
    """Let engines with ``enforce_eager=False`` capture full graphs of uniform batches; vLLM captures none on a CPU."""
    from vllm.config.compilation import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    platform = type(current_platform)
    honest = platform.check_and_update_config

    def update(config: Any) -> None:
        honest(config)
        if not config.model_config.enforce_eager:
            compilation = config.compilation_config
            compilation.mode, compilation.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
            compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 2], 2
            # vLLM 0.33 warms up kernels of its own that the interpreter refuses; and captures must not rely on it.
            config.kernel_config.enable_jit_warmup = False

    patch.setattr(platform, "check_and_update_config", staticmethod(update))
    patch.setattr(platform, "opaque_attention_op", classmethod(lambda _: False))


def use_graphs(patch: pytest.MonkeyPatch) -> None:
    """Replace torch's graphs and record launches of interpreted kernels."""
    from triton.runtime.interpreter import GridExecutor
    from vllm.platforms import current_platform

    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", Capture)
    for module in (torch.cuda, torch.accelerator):
        patch.setattr(module, "synchronize", lambda *_: None)
    patch.setattr(GridExecutor, "__call__", kernel(GridExecutor.__call__))
    patch.setattr(type(current_platform), "_global_graph_pool", object(), raising=False)
