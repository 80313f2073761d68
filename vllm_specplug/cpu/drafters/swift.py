"""SWIFT on the V1 runner: the target drafts over its own pages, with some of its sub-layers left out.

Key/value of drafted tokens is kept in a scratch outside the pages, so that drafting cannot touch committed pages.
Verification writes the pages of accepted tokens, as for every method.  Candidate layer sets are scored in the same way
between the steps, as often as the ledger allows.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_specplug.core.kv import DraftScratch
from vllm_specplug.cpu.attention import level_metadata
from vllm_specplug.cpu.drafters.adapters import map_adapters
from vllm_specplug.cpu.drafters.base import V1Drafter
from vllm_specplug.cpu.drafters.layer_skipping import LayerSkipping
from vllm_specplug.proposers.swift.drafting import MAX_SIBLINGS, DraftedLevel, chain_with_siblings
from vllm_specplug.proposers.swift.layer_set import LayerSet
from vllm_specplug.proposers.swift.ledger import Ledger
from vllm_specplug.proposers.swift.options import SwiftOptions
from vllm_specplug.proposers.swift.state import SwiftState, load_state
from vllm_specplug.types import Draft
from vllm_specplug.vllm.kv_groups import groups_by_layer
from vllm_specplug.vllm.ranks import agreed, leads

logger = logging.getLogger("vllm_specplug")

#: Candidates that are scored on one window, if there is another window.
WINDOW_USES = 8
#: Steps between two scorings of the best set after its search has ended.
CHECK_EVERY = 50
#: Seconds that the Gaussian process is assumed to take before it was timed.
FIRST_GUESS_SECONDS = 0.1


class _Window(NamedTuple):
    """Tokens ``start`` to ``start + context_window`` of a request; the tokens after them are known."""

    request_id: str
    start: int


class _Trial(NamedTuple):
    """A layer set to score on a window."""

    layer_set: LayerSet
    window: _Window


class _Open(NamedTuple):
    """A draft whose outcome is not known yet."""

    num_tokens: int
    draft_steps: int


class SwiftProposer(V1Drafter):
    """The target itself, with layers left out; it searches for better layer sets after the draft phase."""

    options: SwiftOptions

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        self.max_model_len = vllm_config.model_config.max_model_len
        self.ledger = Ledger(self.options.optimise_share, self.options.max_delay)
        #: Whether the lost time of a measured budget limits the search too; a larger share asks for more search.
        self._limited = self.options.optimise_share <= SwiftOptions.optimise_share
        self._wanted, self._phase_began = np.zeros(0, dtype=bool), 0.0
        #: Rows of the scratch per batch index.
        self._capacity = max(self.options.draft_depth, self.options.context_window)
        self._open: dict[str, _Open] = {}
        #: By request: the end of its last window.
        self._looked_at: dict[str, int] = {}
        self._window: _Window | None = None
        self._uses = self._steps_since_look = 0
        self._trial_seconds, self._bayesian_seconds = 0.0, FIRST_GUESS_SECONDS

    def load_model(self, target_model: torch.nn.Module) -> None:
        self._model = target_model
        self._skipping = LayerSkipping(target_model)
        names = self._skipping.attention_names()
        self._layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, names)
        shapes = {name: (layer.impl.num_kv_heads, layer.impl.head_size) for name, layer in self._layers.items()}
        dtypes = {name: layer.kv_cache_torch_dtype for name, layer in self._layers.items()}
        self._scratch = DraftScratch(shapes, dtypes)
        options, path = self.options.search_options(self._skipping.num_layers), self.options.swift_state
        self.state = load_state(path, options) if path and Path(path).exists() else SwiftState(options)
        num_sub_layers = 2 * self._skipping.num_layers
        self.shortest_draft = 1 - self.state.search.best.num_skipped / num_sub_layers

    # ---- hooks of the draft phase

    def before_draft(self, wanted: np.ndarray, hidden_states: torch.Tensor) -> None:
        self._wanted, self._phase_began = wanted, time.perf_counter()
        batch = self.runner.input_batch
        for place, request_id in enumerate(batch.req_ids):
            drafted = self._open.pop(request_id, None)
            new = int(batch.num_tokens_no_spec[place]) - drafted.num_tokens if drafted else 0
            if new > 0:
                acceptance = self.state.acceptance
                acceptance.rounds += 1
                acceptance.draft_steps += drafted.draft_steps
                acceptance.accepted += new - 1

    def after_draft(self, step_began: float) -> None:
        """Search for better layer sets, if the ledger allows."""
        request_ids, seconds = self.runner.input_batch.req_ids, time.perf_counter() - step_began
        self.ledger.serve(request_ids, seconds)
        begin = time.perf_counter()
        if self.options.optimise_share:
            self._optimise(request_ids, seconds)
        self.state.seconds["served"] += seconds + time.perf_counter() - begin
        if self.options.swift_state is not None and leads():
            self.state.save_now_and_then(self.options.swift_state)

    def finish(self, request_ids: Collection[str]) -> None:
        self.ledger.finish(request_ids)
        for request_id in request_ids:
            self._open.pop(request_id, None)
            self._looked_at.pop(request_id, None)

    # ---- drafting

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> Draft:
        """Draft one tree per request."""
        begin = time.perf_counter()
        num_reqs = len(sampled_token_ids)
        last = np.maximum(num_tokens_no_spec[:num_reqs] - 1, 0).astype(np.int64)
        roots = torch.from_numpy(token_ids_cpu[np.arange(num_reqs), last]).long()
        # Nothing can be emitted after the model's last position.
        drafted = np.flatnonzero(self._wanted & (last < self.max_model_len - 1))
        layer_set = agreed(self.state.search.best)  # the first tensor-parallel rank searches
        levels = self._draft(layer_set, torch.from_numpy(drafted), roots, torch.from_numpy(last))
        steps = Counter(place for level in levels for place in level.requests.tolist())
        for place in drafted.tolist():
            request_id = self.runner.input_batch.req_ids[place]
            self._open[request_id] = _Open(int(last[place]) + 1, steps[place])
        draft = chain_with_siblings(roots, levels, self.options.num_speculative_tokens)
        self.state.seconds["draft"] += time.perf_counter() - begin
        return draft

    def _draft(
        self, layer_set: LayerSet, requests: torch.Tensor, roots: torch.Tensor, last: torch.Tensor
    ) -> list[DraftedLevel]:
        levels: list[DraftedLevel] = []
        token_ids, level_seconds = roots[requests], 0.0
        for depth in range(min(self.options.draft_depth, self.options.num_speculative_tokens)):
            if not len(requests) or (depth and not self._may_go_on(level_seconds)):
                break
            begin = time.perf_counter()
            mask = torch.ones(len(requests), 1, depth + 1, dtype=torch.bool)
            logits = self._forward(layer_set, requests, last[requests], token_ids.unsqueeze(1), depth, mask)
            probs, best = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(min(MAX_SIBLINGS, logits.shape[-1]))
            levels.append(DraftedLevel(requests, best, probs))
            goes_on = (probs[:, 0] >= self.options.min_confidence) & (last[requests] + depth + 2 < self.max_model_len)
            requests, token_ids = requests[goes_on], best[goes_on, 0]
            level_seconds = time.perf_counter() - begin
        return levels

    def _may_go_on(self, seconds: float) -> bool:
        """Decide whether the draft phase may take so many further seconds; the first rank's clock says."""
        if self.limits.seconds == math.inf:
            return True
        return agreed(time.perf_counter() - self._phase_began + seconds <= self.limits.seconds)

    # ---- optimisation

    @torch.inference_mode()
    def _optimise(self, request_ids: list[str], step_seconds: float) -> None:
        """Score one layer set on one window, if the ledger of the first tensor-parallel rank allows."""
        begin = time.perf_counter()
        trial = agreed(self._choose_trial(request_ids, step_seconds) if leads() else None)
        if trial is None:
            return
        chosen = time.perf_counter()
        matchness = self._matchness(trial.layer_set, request_ids.index(trial.window.request_id), trial.window.start)
        if not leads():
            return
        search = self.state.search
        changed = search.add(trial.layer_set, matchness)
        end = time.perf_counter()
        self._uses += 1
        self._steps_since_look = 0
        self._trial_seconds = 0.8 * (self._trial_seconds or end - chosen) + 0.2 * (end - chosen)
        self.state.seconds["optimise"] += end - chosen
        self.ledger.charge(request_ids, end - begin)
        if self._limited and self.runner.serving_budget is not None:
            self.runner.serving_budget.searched(end - begin)
        if changed:
            logger.debug("vllm-specplug: swift: step %d, matchness %.3f", search.all_steps, search.matchness)

    def _choose_trial(self, request_ids: list[str], step_seconds: float) -> _Trial | None:
        self._steps_since_look += 1
        seconds = self._trial_seconds or step_seconds
        if not self._may_search(request_ids, seconds):
            return None
        window = self._choose_window(request_ids)
        if window is None:
            return None
        search, begin = self.state.search, time.perf_counter()
        thinks = search.wants_bayesian
        seconds += self._bayesian_seconds
        affordable = self._may_search(request_ids, seconds)
        layer_set = search.next_set(window, bayesian=affordable)
        seconds = time.perf_counter() - begin
        if thinks and not search.wants_bayesian:
            self._bayesian_seconds = seconds
        self.state.seconds["propose"] += seconds
        return None if layer_set is None else _Trial(layer_set, window)

    def _may_search(self, request_ids: list[str], seconds: float) -> bool:
        budget = self.runner.serving_budget if self._limited else None
        return (budget is None or budget.may_search(seconds)) and self.ledger.allows(request_ids, seconds)

    def _choose_window(self, request_ids: list[str]) -> _Window | None:
        """Return the current window while it is fresh or the only one; else the newest tokens of an answer."""
        batch, gamma, stopped = self.runner.input_batch, self.options.context_window, bool(self.state.search.stopped)
        if self._window is not None and self._window.request_id not in request_ids:
            self._window = None
        if self._window is not None and self._uses < WINDOW_USES and not stopped:
            return self._window
        for place in np.flatnonzero(self._wanted).tolist():
            request_id = request_ids[place]
            start = int(batch.num_tokens_no_spec[place]) - 1 - gamma
            found = _Window(request_id, start)
            # The first token of an answer is predicted from the last one of the prompt.
            if start < max(int(batch.num_prompt_tokens[place]) - 1, self._looked_at.get(request_id, 0)):
                continue
            if stopped and self._steps_since_look < CHECK_EVERY:
                continue
            self._looked_at[request_id] = start + gamma
            self._window, self._uses = found, 0
            return found
        return None if stopped else self._window

    def _matchness(self, layer_set: LayerSet, place: int, start: int) -> float:
        """Return the share of the window's tokens that the drafting model predicts (SWIFT, section 4.1.2)."""
        gamma = self.options.context_window
        tokens = torch.from_numpy(self.runner.input_batch.token_ids_cpu[place, start : start + gamma + 1]).long()
        mask = torch.ones(1, gamma, gamma, dtype=torch.bool).tril()
        logits = self._forward(layer_set, torch.tensor([place]), torch.tensor([start]), tokens[None, :-1], 0, mask)
        return float((logits.argmax(dim=-1) == tokens[1:]).float().mean())

    # ---- the target with layers left out

    def _forward(
        self,
        layer_set: LayerSet,
        requests: torch.Tensor,
        context_lens: torch.Tensor,
        token_ids: torch.Tensor,
        first: int,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Run the target without ``layer_set``.

        Args:
            layer_set: sub-layers to leave out.
            requests: int64 ``[n]``; batch indices.
            context_lens: int64 ``[n]``; tokens whose pages are read.
            token_ids: int64 ``[n, width]``; tokens after the context and the ``first`` tokens of earlier forwards.
            first: tokens fed since the context.
            mask: bool ``[n, width, first + width]``; which of the fed tokens each row sees.

        Returns:
            Logits ``[n * width, vocab_size]``.
        """
        count, width = token_ids.shape
        batch = self.runner.input_batch
        map_adapters(self.runner, requests, width)
        start = requests * self._capacity
        rows = (start.unsqueeze(1) + torch.arange(first, first + width)).flatten()
        positions = (context_lens.unsqueeze(1) + torch.arange(first, first + width)).flatten()
        scratch = self._scratch.at(rows, batch.num_reqs * self._capacity)
        metadata = [
            level_metadata(
                table.get_device_tensor(batch.num_reqs)[requests],
                context_lens.to(torch.int32),
                start.to(torch.int32),
                mask,
                scratch,
            )
            for table in batch.block_table.block_tables
        ]
        groups = groups_by_layer(self.runner.kv_cache_config)
        with (
            self._skipping.left_out(layer_set),
            set_forward_context(
                {name: metadata[groups[name]] for name in self._layers},
                self.vllm_config,
                num_tokens=count * width,
                slot_mapping={},
                skip_compiled=True,
            ),
        ):
            hidden = self._model(
                input_ids=token_ids.flatten().to(torch.int32),
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return self._model.compute_logits(hidden)
