"""What older hosts do otherwise, on this one: stand-ins in their shapes."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from tests.unit.hosts.test_grammars import VERSIONS, request
from vllm_specplug.cpu import draft as draft_phase
from vllm_specplug.cpu import scheduler
from vllm_specplug.cpu.runner import TreeCPUModelRunner
from vllm_specplug.cpu.scheduler import TreeScheduler, TreeSchedulerOutput


def test_a_step_without_drafts_has_no_metadata():
    """Until 0.31: its rows are sampled plainly, and no request has drafts."""
    sampled = []
    runner = SimpleNamespace(_step=None, _sample_plainly=lambda logits: sampled.append(logits) or "tokens")
    logits = torch.zeros(2, 5)
    assert TreeCPUModelRunner._sample(runner, logits, None) == "tokens" and sampled == [logits]
    assert draft_phase._num_drafts(None, 2).tolist() == [0, 0]


@dataclass
class OlderGrammarOutput:
    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray


def test_masks_are_sent_as_older_workers_take_them(monkeypatch):
    monkeypatch.setattr(scheduler, "GrammarOutput", OlderGrammarOutput)
    one = request(reasoning_ended=True)
    one.use_structured_output, one.is_prefill_chunk = True, False
    host = SimpleNamespace(requests={"r": one, "free": SimpleNamespace(use_structured_output=False)})
    empty = TreeSchedulerOutput(**vars(SchedulerOutput.make_empty()))
    step = replace(
        empty,
        num_scheduled_tokens={"free": 1, "r": 3, "finished": 1},
        scheduled_spec_decode_tokens={"r": [1, 2]},
        parents={"r": [0, 1]},
    )
    for host.structured_output_manager in VERSIONS:
        output = TreeScheduler.get_grammar_bitmask(host, step)
        assert output.structured_output_request_ids == ["r"]
        assert output.grammar_bitmask[:, 0].tolist() == [2, 4, 8]
        assert TreeScheduler.get_grammar_bitmask(host, empty) is None
