"""Interface of a speculator on the V2 runner: trees of a fixed size, drafted without CPU-GPU synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.config.compilation import CUDAGraphMode

from vllm_specplug.config import MAX_NUM_SPECULATIVE_TOKENS, TreeOptions, model_drafter
from vllm_specplug.core.guard import Guard
from vllm_specplug.core.pruning import best_nodes
from vllm_specplug.gpu import step
from vllm_specplug.gpu.draft_sampling import DeviceDraftSampling, Proposals, draft_sampling
from vllm_specplug.gpu.growth import Growth
from vllm_specplug.gpu.late_learning import LateLearning
from vllm_specplug.gpu.rounds import most_levels, most_rows, shapes
from vllm_specplug.gpu.slot_params import SlotParams
from vllm_specplug.gpu.timing import StepTimer
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.proposer import DeviceDraftContext, DeviceLearner, DeviceRemembering, EndedRequest, find_method
from vllm_specplug.types import PADDING, Draft
from vllm_specplug.vllm.ranks import leads, several_ranks


class TreeSpeculator:
    """Mixed into a speculator of vLLM, in front of it.

    Attributes:
        options: of the drafter with weights; None for a model-free method.
        trees: the last drafts.
        timer: counts and times the step.
        guard: catches errors of the drafter; not with several ranks, which must verify the same trees.
        learning: teaches the method's proposer; None if it does not learn.
        slot_params: sampling parameters by request.
        proposals: the distributions that sampled trees were drawn from, if they are verified by rejection.
        sampling: how the draft phase that runs samples; None: it takes the likeliest tokens.
        draft_attn_layer_names: attention layers of a draft model; empty without one.
        depths: by nodes of a shape, the levels of its trees.
        draft_nodes, draft_depth: most nodes and levels that the drafter with weights drafts in this round.
    """

    options: TreeOptions | None
    trees: DeviceTrees
    timer: StepTimer
    guard: Guard
    learning: LateLearning | None
    slot_params: SlotParams
    proposals: Proposals
    sampling: DeviceDraftSampling | None = None
    draft_attn_layer_names: set[str]
    depths: dict[int, int]
    draft_nodes: int
    draft_depth: int
    #: Whether users' requests are served; earlier runs leave no trace.
    _serves = False
    #: Whether the growth of trees is recorded in CUDA graphs.
    _records = False
    #: The speculator's own part of ``propose``; takes its arguments.
    draft_trees: Callable[..., torch.Tensor]
    #: Drafts with the weights, from the slots (int ``[num_reqs]``; -1: not used), the last emitted tokens (int64
    #: ``[num_reqs]``) and the inputs that were given to ``_draft`` (``[num_reqs, ...]`` each).
    _draft_by_model: Callable[..., Draft]

    def init_trees(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        """To be called by ``__init__``."""
        scheduler, config = vllm_config.scheduler_config, vllm_config.speculative_config
        method = find_method(config.specplug.method)
        self.options, self._req_states = model_drafter(config.specplug), req_states
        #: None: the drafter with weights is all there is.
        self._proposer = None if method.make_on_device is None else method.make_on_device(config.specplug)
        learns = isinstance(self._proposer, DeviceLearner)
        self.learning = LateLearning(self._proposer, device) if learns else None
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self.guard = Guard(config.specplug.method, raises=several_ranks())
        metrics_file = config.metrics_file if leads() else None  # every tensor-parallel rank does the same
        self.timer = StepTimer(metrics_file, device, vllm_config.parallel_config.data_parallel_index)
        self.trees = DeviceTrees(
            scheduler.max_num_seqs,
            config.num_speculative_tokens,
            most_levels(config.specplug),
            scheduler.max_num_batched_tokens,
            device,
        )
        self.proposals = Proposals(scheduler.max_num_seqs)
        self.depths = {shape.nodes: shape.depth for shape in shapes(config.specplug)}
        rows = most_rows(config.specplug, scheduler.max_num_batched_tokens)
        #: By nodes of a shape, and whether drafts of any request are sampled, which takes more kernels.
        self._growths = {
            (nodes, samples): Growth(
                partial(self._grow, nodes, samples), max(min(scheduler.max_num_seqs, rows // (nodes + 1)), 1)
            )
            for nodes in self.depths
            for samples in (False, True)
        }

    def load_heads(self, target_model: torch.nn.Module) -> None:
        """Load weights that vLLM does not load itself."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Called with every KV cache.  The first cache may be small, to measure the memory of graphs, and is freed
        again: graphs recorded with it would read freed memory."""
        for growth in self._growths.values():
            growth.forget()
        self._records = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        super().init_cudagraph_manager(cudagraph_mode)

    def propose(
        self,
        input_batch: Any,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft one tree per request, see ``step.draft``.

        Args:
            num_speculative_tokens: nodes of the round's shape; 0 drafts nothing; None: the configured ones.

        Returns:
            int64 ``[num_reqs, num_speculative_tokens]``; the nodes' tokens.  Their parents are kept in ``trees``.
        """
        self._nodes = self.trees.width - 1 if num_speculative_tokens is None else num_speculative_tokens
        if dummy_run:
            return self.draft_trees(input_batch, *args, dummy_run=True, **kwargs)
        draft = self.draft_trees if self._nodes else self.keep_up
        return step.draft(self, input_batch, partial(draft, input_batch, *args, **kwargs))

    def start_serving(self) -> None:
        """Learn from here on, and keep answers; called at the end of the start."""
        self._serves = True
        if isinstance(self._proposer, DeviceRemembering):  # compiles its kernels; the answer has no token
            most = self._req_states.all_token_ids.gpu.shape[1]
            self._finish(0, most, most)
        if self.learning is not None:
            self.learning.start()

    def finish(self, req_ids: Collection[str], ends: Mapping[str, int]) -> None:
        """Let the proposer keep the answers of requests, or of turns, that have ended with speculation on.

        Args:
            ends: tokens of requests up to the end of their answers; the device may have some after a stop.
        """
        if not (self._serves and isinstance(self._proposer, DeviceRemembering)):
            return
        known = self._req_states
        for req_id in sorted(req_ids):
            slot = known.req_id_to_index.get(req_id)
            if slot is not None and self.slot_params.speculates[slot]:
                most = known.all_token_ids.gpu.shape[1]
                self._finish(slot, int(known.prompt_len.np[slot]), ends.get(req_id, most))

    def _finish(self, slot: int, prompt_len: int, end: int) -> None:
        """Let the proposer keep the tokens of a slot after the first ``prompt_len``, up to ``end``."""
        known = self._req_states
        tokens = known.all_token_ids.gpu, known.total_len.gpu, self.slot_params.namespaces
        self.guard.run(partial(self._proposer.finish, EndedRequest(*tokens, slot, prompt_len, end)))

    def keep_up(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Read what a drafter with a KV cache must know of the step, without drafting; arguments of ``propose``."""
        return self.draft_nothing(input_batch)

    def draft_nothing(self, input_batch: Any) -> torch.Tensor:
        """Keep trees without nodes, and return placeholders of their tokens."""
        shape = (input_batch.num_reqs, self.trees.width)
        parents = torch.full(shape, PADDING, dtype=torch.int64, device=self.trees.parents.device)
        self.trees.keep(parents, input_batch.idx_mapping)
        return torch.zeros_like(parents[:, 1:])

    def _block_table(self, attn_metadata: dict[str, Any] | None, num_reqs: int) -> torch.Tensor:
        """Return the block table of the draft model's layers, int32 ``[num_reqs, max_blocks]``."""
        if attn_metadata is not None:
            return attn_metadata[next(iter(self.draft_attn_layer_names))].block_table[:num_reqs]
        # vLLM profiles the memory before there is a cache: all but the attention runs.
        return torch.zeros(num_reqs, 1, dtype=torch.int32, device=self.device)

    def _empty_block_table(self) -> torch.Tensor:
        """Return a block table of all requests, to record graphs with."""
        width = self.block_tables.input_block_tables[0].shape[1]
        return torch.zeros(self.max_num_reqs, width, dtype=torch.int32, device=self.device)

    def _record(self, *inputs: torch.Tensor) -> None:
        """Record the growth, see ``Growth.record``."""
        slots = torch.zeros_like(self.trees.parents[:, 0])
        for (_, samples), growth in self._growths.items():
            if not samples or self.slot_params.may_sample:
                growth.record(slots, slots.clone(), *inputs)

    def _draft(
        self, input_batch: Any, dummy_run: bool, last_sampled: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Grow the trees, keep their parents and return the nodes' tokens, see ``propose``."""
        slots = input_batch.idx_mapping
        samples = not dummy_run and bool(self.slot_params.samples[input_batch.idx_mapping_np].any())
        growth = self._growths[self._nodes if self._nodes in self.depths else self.trees.width - 1, samples]
        token_ids, parents = growth(input_batch.num_reqs, slots, last_sampled[slots].view(-1), *inputs)
        shape = (input_batch.num_reqs, self.trees.width)
        if not shape == tuple(token_ids.shape) == tuple(parents.shape) or parents.dtype != torch.int64:
            raise ValueError(
                f"a draft must be int64 {shape}, found token ids {tuple(token_ids.shape)} and parents "
                f"{tuple(parents.shape)} {parents.dtype}"
            )
        if not dummy_run:
            self.trees.keep(parents, slots)
            if self.learning is not None:
                self.learning.drafted(input_batch.req_ids, growth.at_once)
        # A node that could not be drafted is still a row of the next forward, so that it needs a valid token id.
        return token_ids[:, 1:].clamp(0, self._vocab_size - 1)

    def _grow(
        self,
        nodes: int,
        samples: bool,
        num_reqs: int,
        slots: torch.Tensor,
        root_token_ids: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and parents, int64 ``[num_reqs, num_rows]``; see ``growth.Grow``.

        The trees have ``nodes`` nodes; the rows after them are padding.
        """
        known, draft_by_model = self._req_states, None
        self.draft_depth = self.depths[nodes]
        self.draft_nodes = nodes if self._proposer is None else MAX_NUM_SPECULATIVE_TOKENS
        self.sampling = draft_sampling(self.slot_params, slots, known.total_len.gpu) if samples else None
        if self.options is not None:
            draft_by_model = partial(self._draft_by_model, slots, root_token_ids, *inputs)
        if self._proposer is None:
            draft = draft_by_model()
            if samples and self.slot_params.rejects:
                self.proposals.keep(draft.proposal, slots)
        else:
            tokens = known.all_token_ids.gpu, known.total_len.gpu, self.slot_params.namespaces
            context = DeviceDraftContext(root_token_ids, slots, *tokens, draft_by_model)
            draft = self._proposer.propose(context)
        tree = draft.tree if draft.tree.token_ids.shape[1] <= nodes + 1 else best_nodes(draft, nodes).tree
        missing = self.trees.width - tree.token_ids.shape[1]
        return tuple(pad(rows, (0, missing), value=PADDING) for rows in (tree.token_ids, tree.parents))
