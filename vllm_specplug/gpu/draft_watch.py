"""Watches on the V2 runner whether drafts help, from the tokens that reach vLLM's scheduler one step late."""

from __future__ import annotations

from typing import Any

from vllm_specplug.utils.metrics import Counters
from vllm_specplug.vllm.draft_watch import DraftWatch


class WatchedDrafts:
    """Mixed into a scheduler of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config, parallel = self.vllm_config.speculative_config, self.vllm_config.parallel_config
        counters = Counters(config.metrics_file, parallel.data_parallel_index)
        self.draft_watch = DraftWatch(config.specplug, config.draft_entries, counters)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        tokens, places = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        drafted = [places[req_id] for req_id, nodes in scheduled.items() if nodes and req_id in places]
        emitted = [count for place in drafted if tokens and (count := len(tokens[place]))]
        helpful = sum(count > 1 for count in emitted)
        self.draft_watch.add(len(emitted), helpful)
        self.draft_watch.judge(len(emitted), helpful)
        return super().update_from_output(scheduler_output, model_runner_output)
