"""The proof at start on the V2 model runner: it passes, or catches a planted fault and leaves plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm import LLM
from vllm.utils import gpu_sync_debug

from tests.hosts import conftest as hosts
from tests.hosts.conftest import counters
from tests.v2.conftest import ENGINE, GREEDY, answers, same
from vllm_specplug.core.proof import ProofFailed
from vllm_specplug.gpu import step
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.utils import proof_files
from vllm_specplug.vllm.proof.driver import DriverV2
from vllm_specplug.vllm.proof.worker import prove

PROVEN = True
LOOKUP = {"method": "lookup", "num_speculative_tokens": 8, "traffic_tokens": 1024, "budget": "fixed"}
#: Not autouse: an engine that a test of another file starts would leave its proof in the empty folder.
pytestmark = pytest.mark.usefixtures("kept_nothing")


@pytest.fixture
def kept_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(proof_files, "FOLDER", tmp_path)


def prove_again(llm):
    prove(DriverV2(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker))


@pytest.fixture(scope="module")
def proven(engine):
    return engine(speculative_config=LOOKUP, max_num_seqs=5, **ENGINE)


def parents_not_seen(monkeypatch):
    honest = DeviceTrees.keep

    def keep(self, tree_parents, slots):
        honest(self, tree_parents, slots)
        parents = self.parents[slots]
        bits = torch.where(parents >= 0, 1 << parents.clamp(min=0), 0)
        self.slot_bits[slots, :, 0] &= ~bits

    monkeypatch.setattr(DeviceTrees, "keep", keep)


def positions_not_moved(monkeypatch):
    honest = DeviceTrees.stage

    def stage(self, input_batch):
        rows = honest(self, input_batch)
        if rows is not None:
            input_batch.positions[: input_batch.num_tokens].copy_(self._flat_positions[: input_batch.num_tokens])
        return rows

    monkeypatch.setattr(DeviceTrees, "stage", stage)


def a_row_not_moved(monkeypatch):
    honest = step.plan_step

    def plan_step(*args):
        plan = honest(*args)
        sources = plan.source_rows.clone()
        last = int((sources[0] >= 0).sum()) - 1
        sources[0, last] = plan.target_rows[0, last]
        return replace(plan, source_rows=sources)

    monkeypatch.setattr(step, "plan_step", plan_step)


def test_it_passes(proven, monkeypatch):
    """Also where vLLM refuses that the CPU waits for the device: the proof reads logits, and says so."""
    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    allowed, honest = [], DriverV2._read
    monkeypatch.setattr(
        DriverV2, "_read", lambda *args: allowed.append(gpu_sync_debug._allow_depth.get()) or honest(*args)
    )
    prove_again(proven)
    assert set(allowed) == {1} and gpu_sync_debug._allow_depth.get() == 0
    (result,) = proof_files.kept()
    assert result["fault"] == "" and result["difference"] <= result["bound"] < result["control"]


@pytest.mark.parametrize("fault", [parents_not_seen, positions_not_moved, a_row_not_moved])
def test_faults_are_caught(proven, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(ProofFailed, match="differs by .* from plain decoding; the rows together by .*, bound"):
        prove_again(proven)


def test_a_server_that_decodes_plainly(engine, checkpoints, prompts, plain, monkeypatch):
    parents_not_seen(monkeypatch)
    settings = {**hosts.ENGINE, **ENGINE, "speculative_config": {**LOOKUP, "on_failure": "plain"}}
    llm = LLM(str(checkpoints["target"]), **settings)
    engine.kept.append(llm)
    rows = []
    honest = DeviceTrees.stage
    monkeypatch.setattr(DeviceTrees, "stage", lambda self, batch: rows.append(batch.num_tokens) or honest(self, batch))
    assert same(answers(llm, prompts, GREEDY), plain)
    assert rows[-1] <= len(prompts)  # no drafts in a forward
    assert counters(llm)["accepted_tokens"] == 0
