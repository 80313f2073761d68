"""What a device is asked to do in a draft phase and in a step: bounds on launches, and no look at its values."""

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch

from benchmarks.micro import launches
from tests.doubles.cuda_graphs import Graph
from tests.doubles.device_work import DeviceWork
from tests.hosts.conftest import runner_of, some
from tests.v2.conftest import ENGINE, answers, same
from tests.v2.test_identity import TREE
from tests.v2.test_lookup import LOOKUP, SOURCE
from tests.v2.test_union import EAGLE
from vllm_specplug.gpu.kernels.row_tokens import row_tokens
from vllm_specplug.gpu.late_learning import LateLearning
from vllm_specplug.gpu.trees import DeviceTrees
from vllm_specplug.proposers.lookup.device_proposer import LookupOnDevice

#: Depth 6 and 10 nodes a level: for each level two launches choose children, one grows the pool, one gathers features.
#: The children of sampled requests take one launch more for each level.
MOST = {"eagle2": 1 + 6 * 3 + 5 + 1, "sampled": 6 * 3, "lookup": 3, "union": 7, "plan": 1}


@pytest.mark.interpreted
def test_launches_of_a_draft_phase(monkeypatch):
    monkeypatch.setattr(launches, "NUM_REQS", 1)  # as many as for several requests
    found = launches.counts()
    assert all(kernels <= MOST[name] for name, (_, kernels) in found.items()), found
    assert all(operations > 5 * kernels for operations, kernels in found.values())


def rows_by_torch(rows, slots, local, input_ids, positions, depths, prefill_len):
    pos = positions[rows]
    placeholder = (local > 0) & (pos - depths[slots, local.long()] < prefill_len[slots])
    return input_ids[rows].masked_fill(placeholder, -1), pos


def test_tokens_of_rows_take_one_launch():
    """Of 300 trees of 4 rows in another order of slots; of every third the prompt is not read yet."""
    slots, local = torch.randperm(300, dtype=torch.int32).repeat_interleave(4), torch.arange(4).int().repeat(300)
    rows = torch.arange(1200) + 5
    depths = torch.tensor([0, 1, 1, 2]).repeat(300, 1)
    positions = torch.randint(0, 90, (1210,))
    given = (rows, slots, local, torch.arange(1210).int(), positions, depths, 60 * (torch.arange(300) % 3 == 0).int())
    counted = []
    for compute in (rows_by_torch, row_tokens):
        with DeviceWork() as work:
            found = compute(*given)
        counted.append((sum(work.launches.values()), found))
    (before, expected), (after, found) = counted
    assert (before, after) == (10, 1)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and (found[0] == -1).any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches of the interpreter")
def test_launches_outside_graphs(graph_engine, prompts, monkeypatch):
    """Of a step that reads no prompt: positions and masks, verification, drafts.  vLLM's preparation of the step
    and the target's forward are not counted."""
    llm = graph_engine("eagle", TREE, async_scheduling=True, max_num_seqs=3, **ENGINE)
    runner, steps = runner_of(llm), []

    def counted(part, function):
        def call(*args, **kwargs):
            before = Graph.replays
            with DeviceWork() as work:
                result = function(*args, **kwargs)
            if part == "stage":
                steps.append({})
            steps[-1][part] = sum(work.launches.values()), Graph.replays - before
            return result

        return call

    monkeypatch.setattr(DeviceTrees, "stage", counted("stage", DeviceTrees.stage))
    monkeypatch.setattr(runner, "rejection_sampler", counted("verify", runner.rejection_sampler))
    monkeypatch.setattr(runner.speculator, "propose", counted("draft", runner.speculator.propose))
    for temperature, verify in ((0, 11), (0.8, 13)):
        steps.clear()
        llm.generate(prompts[:2], SamplingParams(temperature=temperature, seed=1, max_tokens=7, ignore_eos=True))
        with_trees = [step for step in steps if "verify" in step][:-1]  # vLLM 0.33 drafts nothing after the last step
        assert len(with_trees) > 1
        for step in with_trees:
            assert step == {"stage": (2, 0), "verify": (verify, 0), "draft": (17, 2)}
    # The plan of the accepted rows is as long as the forward, at most three trees of ten rows, not as the largest step.
    assert runner.speculator.trees.plan.path_index.numel() <= 3 * 10 < runner.max_num_tokens


# ---- looks at values


def looks_of(monkeypatch, call):
    """Places where the CPU looks at a device's values during ``call``, and its result."""
    work, honest, learn = DeviceWork(), InputBatch.__init__, LateLearning._learn

    def made(self, *args, **kwargs):
        honest(self, *args, **kwargs)
        work.keep_on_cpu(self.seq_lens_cpu_upper_bound)

    def learned(self, one):
        learned_from.append(one)
        tables = [table for _, table in self._proposer.tables()]
        with work.on_the_cpu([*self._proposer.drafted(), *tables]):
            learn(self, one)

    work.learned_from = learned_from = []
    with monkeypatch.context() as patch, work:
        patch.setattr(LateLearning, "_learn", learned)
        patch.setattr(InputBatch, "__init__", made)
        result = call()
    return work, result


@pytest.mark.parametrize(
    "look",
    [
        lambda values: values[0].item(),
        lambda values: values.tolist(),
        lambda values: values.cpu(),
        lambda values: values.nonzero(),
        lambda values: values[values > 1],
        lambda values: values.masked_select(values > 1),
        lambda values: values.unique(),
        lambda values: bool(values[0]),
        lambda values: values.numpy(),
        lambda values: values.index_put_((values > 1,), torch.tensor(0)),
    ],
)
def test_control_of_the_looks(look):
    with DeviceWork() as work:
        look(torch.arange(3))
    assert work.looks


def test_no_look_where_there_is_none():
    with DeviceWork() as work:
        values = torch.arange(3)
        values.gather(0, values), values[values], values.where(values > 1, 0), values.float()
    assert not work.looks and work.launches["gather"] == 1 and "view" not in work.launches


@pytest.fixture
def start(engine, checkpoints):
    def make(name):
        if name == "eagle2":
            return engine("eagle", TREE, **ENGINE)
        config = LOOKUP
        if name == "union":
            source = {**EAGLE, "model": str(checkpoints["eagle"])}
            config = {"method": "union", "sources": [source, SOURCE], "num_speculative_tokens": 12, "budget": "fixed"}
        return engine(speculative_config=config, **ENGINE)

    return make


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["eagle2", "lookup", "union"], ["union"]))
def test_whole_steps_look_at_no_value(start, prompts, plain, monkeypatch, name):
    """From scheduling to the next drafts; vLLM's own code is left out."""
    llm = start(name)
    work, found = looks_of(monkeypatch, lambda: answers(llm, prompts))
    assert same(found, plain)
    assert not work.looks, sorted(set(work.looks))
    assert bool(work.learned_from) == (name != "eagle2")
    assert work.launches["stage_rows_kernel"] > 3 and work.launches["plan_step_kernel"] > 3
    assert runner_of(llm).speculator.guard.failures == 0
    # vLLM keeps the tokens in device memory if this holds, else in CPU memory, which each search would read over PCIe.
    assert llm.llm_engine.vllm_config.speculative_config.use_ngram() == (name != "eagle2")


def test_control_of_learning(start, prompts, monkeypatch):
    """What is learned from are the copies, not what they are copies of."""
    honest = LookupOnDevice.learn

    def learn(self, drafted, outcome):
        honest(self, [values[: len(outcome.requests)] for values in self.drafted()], outcome)

    monkeypatch.setattr(LookupOnDevice, "learn", learn)
    work, _ = looks_of(monkeypatch, lambda: answers(start("lookup"), prompts[:1]))
    assert any("device_proposer" in look for look in work.looks)


def test_control_of_whole_steps(start, prompts, monkeypatch):
    """One value that is read back in each draft phase."""
    honest = DeviceTrees.keep

    def keep(self, tree_parents, slots):
        assert slots[0].item() >= 0
        honest(self, tree_parents, slots)

    llm = start("eagle2")
    monkeypatch.setattr(DeviceTrees, "keep", keep)
    work, _ = looks_of(monkeypatch, lambda: answers(llm, prompts[:1]))
    assert any(look.startswith("item at") for look in work.looks)
