"""What people deploy vLLM with: classes of their own, KV connectors, prompt embeddings, data parallel replicas."""

from __future__ import annotations

import pickle

import pytest
import torch
from vllm import LLM
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs

from tests.doubles import custom_classes
from tests.hosts.conftest import ENGINE, GREEDY, TREE, acceptance_length, answers_of, make_prompts, token_ids

CLASSES = custom_classes.__name__


def arguments(checkpoints, budget="fixed", **options):
    speculative = {**TREE, "model": str(checkpoints["eagle"]), "budget": budget}
    return EngineArgs(str(checkpoints["target"]), speculative_config=speculative, **{**ENGINE, **options})


# ---- classes of the user


def test_custom_worker_and_scheduler(engine, checkpoints):
    """Ours are mixed in: the user's methods run, and trees are drafted."""
    prompts = make_prompts(8)
    expected = answers_of(engine(), prompts, GREEDY)
    classes = {"worker_cls": f"{CLASSES}.CountingWorker", "scheduler_cls": f"{CLASSES}.CountingScheduler"}
    llm = engine("eagle", **classes)
    assert answers_of(llm, prompts, GREEDY) == expected
    assert acceptance_length(llm) > 1.1
    core = llm.llm_engine.engine_core.engine_core
    assert core.scheduler.steps > 3 and core.model_executor.driver_worker.worker.steps > 3


def test_custom_classes_are_found_again(checkpoints):
    """Twice from the same arguments, a class instead of its name, and in another process."""
    args = arguments(
        checkpoints, worker_cls=f"{CLASSES}.CountingWorker", scheduler_cls=custom_classes.CountingScheduler
    )
    for _ in range(2):
        config = pickle.loads(pickle.dumps(args.create_engine_config()))
        found = config.scheduler_config.get_scheduler_cls()
        assert issubclass(found, custom_classes.CountingScheduler)
        names = [base.__name__ for base in found.__mro__[1:4]]
        assert names == ["TreeScheduler", "TreeRequestRules", "CountingScheduler"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler_cls": f"{CLASSES}.CountingWorker"}, "CountingWorker: it is no subclass of .*Scheduler"),
        ({"scheduler_cls": f"{CLASSES}.UsersAsyncScheduler"}, "it is a subclass of .*AsyncScheduler"),
        ({"scheduler_cls": "some.Scheduler"}, "some.Scheduler: it cannot be imported"),
        ({"worker_cls": f"{CLASSES}.CountingScheduler"}, "it is no subclass of .*CPUWorker"),
    ],
)
def test_other_classes_are_refused(checkpoints, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(checkpoints, **options).create_engine_config()


# ---- asynchronous scheduling


def test_asynchronous_scheduling_is_left_to_vllm(checkpoints):
    assert arguments(checkpoints).create_engine_config().scheduler_config.async_scheduling is False
    with pytest.raises(ValueError, match="found --async-scheduling.*leave the option out"):
        arguments(checkpoints, async_scheduling=True).create_engine_config()


# ---- prompt embeddings


def embeddings(checkpoints, prompts):
    """The prompts as their embeddings: the answers are those of the tokens."""
    from safetensors.torch import load_file

    table = load_file(checkpoints["target"] / "model.safetensors")["model.embed_tokens.weight"]
    return [{"prompt_embeds": table[torch.tensor(prompt["prompt_token_ids"])]} for prompt in prompts]


def test_prompt_embeddings(engine, checkpoints):
    """Requests with embeddings beside others with tokens; the drafter reads the embeddings' positions as token 0."""
    prompts = make_prompts(8)
    mixed = [*embeddings(checkpoints, prompts[:4]), *prompts[4:]]
    expected = answers_of(engine(), prompts, GREEDY)
    plain = engine(enable_prompt_embeds=True)
    assert answers_of(plain, mixed, GREEDY) == expected
    eagle = {**TREE, "model": str(checkpoints["eagle"])}
    llm = LLM(str(checkpoints["target"]), **ENGINE, enable_prompt_embeds=True, speculative_config=eagle)
    engine.kept.append(llm)
    assert answers_of(llm, mixed, GREEDY) == expected
    assert acceptance_length(llm) > 1.1


# ---- KV connectors


@pytest.fixture
def connector(tmp_path):
    """A connector that stores in files; vLLM keeps one for the whole process."""
    yield {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    ensure_kv_transfer_shutdown()


def test_kv_connector(engine, checkpoints, connector):
    """Prompts are stored by one engine and loaded by the next one, the drafter's keys and values too."""
    prompts = make_prompts(6, longest=200)
    expected = answers_of(engine(block_size=32), prompts, GREEDY)
    speculative = {**TREE, "model": str(checkpoints["eagle"])}
    loaded = []
    for _ in range(2):
        llm = LLM(
            str(checkpoints["target"]),
            **ENGINE,
            block_size=32,
            enable_prefix_caching=False,
            kv_transfer_config=connector,
            speculative_config=speculative,
        )
        engine.kept.append(llm)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert token_ids(outputs) == expected
        assert acceptance_length(llm) > 1.1
        loaded.append(sum(output.num_cached_tokens for output in outputs))
    assert loaded[1] > loaded[0] == 0


def test_a_drafter_that_may_pause_has_no_connector(checkpoints, connector):
    with pytest.raises(ValueError, match="found method='eagle2', budget='measured'.*with budget='fixed'"):
        arguments(checkpoints, budget="measured", kv_transfer_config=connector).create_engine_config()
