"""The worker's side of the proof at start: whether it runs, the meaning of its result, and the saved file."""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_world_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform

import vllm_specplug
from vllm_specplug.config import ConfigError, parts_of
from vllm_specplug.core.proof import WITHOUT_TREES, Evidence, ProofFailed
from vllm_specplug.cpu.attention import TreeAttentionImpl
from vllm_specplug.cpu.kernels.cpu_ops import operators
from vllm_specplug.utils import proof_files
from vllm_specplug.utils.environment import cpu_name, version_of
from vllm_specplug.utils.metrics import Counters
from vllm_specplug.vllm.check import find_vllm
from vllm_specplug.vllm.proof.attention import fault_of_attention
from vllm_specplug.vllm.proof.driver import Driver, DriverV1, DriverV2, no_drafts_v1
from vllm_specplug.vllm.proof.proof import CannotProve, Proof

# vLLM shows its own loggers only, and every start is to have this line.
logger = init_logger("vllm.vllm_specplug")

#: How a fault begins if ``VLLM_BATCH_INVARIANT=1`` asks for bits that the model does not keep.
OTHER_BITS = "a step without trees gave other bits"
#: Texts that are tried until one passes.
MOST_TEXTS = 3
#: Elements of each parameter that tell one checkpoint from another.
SAMPLES = 4


class ProvesTrees:
    """Mixed into a worker of vLLM: its runner's trees are proven when it is warmed up."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        driver = DriverV2(self) if self.use_v2_model_runner else DriverV1(self)
        prove(driver)
        return times


def prove(driver: Driver) -> None:
    """Prove the runner's trees, unless that was done before; all ranks do the same.

    Raises:
        ProofFailed: the proof failed, and the options do not ask to serve plainly then, or steps without trees fail.
    """
    config = driver.runner.vllm_config.speculative_config
    facts = facts_of(driver.runner)
    if (kept := _from_first_rank(proof_files.load(facts))) is not None:
        logger.info_once("vllm-specplug: proof at start: passed on %s, not repeated", kept["date"])
        return
    began = time.perf_counter()
    try:
        evidence = _run(driver)
    except CannotProve as error:
        logger.warning_once("vllm-specplug: trees are served without the proof at start: %s", error)
        return
    found = fault_of(evidence)
    fault = next((one for one in _from_all_ranks(found) if one), "")
    seconds = time.perf_counter() - began
    numbers = evidence.summary() if isinstance(evidence, Evidence) else {}
    if get_world_group().rank_in_group == 0:
        proof_files.save(facts, fault, seconds=seconds, **numbers)
    if not fault:
        if numbers:
            logger.info_once("vllm-specplug: proof at start: passed in %.2f s: %s", seconds, describe(numbers))
            if isinstance(evidence, Evidence) and evidence.is_weak():
                logger.warning_once(
                    "vllm-specplug: the proof at start has no power: trees without their mask pass it too"
                )
        return
    advice = 'or add "on_failure": "plain", which decodes plainly where trees are not proven'
    if fault.startswith(OTHER_BITS):
        advice = "or unset VLLM_BATCH_INVARIANT"
    elif fault.startswith(WITHOUT_TREES):
        advice = "and if that fails too, vLLM cannot run it on this machine"
    elif config.specplug.on_failure == "plain":
        advice = None
    if advice is not None:
        raise ProofFailed(
            f"vllm-specplug: the proof at start failed: {fault}. Serve this model without speculative_config, {advice}"
        )
    logger.error("vllm-specplug: the proof at start failed, and the server decodes plainly: %s", fault)
    Counters(config.metrics_file).add("proof_failures")
    serve_plainly(driver)


def fault_of(evidence: Evidence | str | None) -> str:
    """Return the fault; empty if the proof has passed, or on a rank without logits."""
    if not isinstance(evidence, Evidence):
        return evidence or ""
    if envs.VLLM_BATCH_INVARIANT and evidence.keeps_bits and not evidence.in_bits():
        return (
            f"{OTHER_BITS} in another batch, and VLLM_BATCH_INVARIANT=1 asks for the same ones: a "
            "part of this model is computed by a kernel of vLLM that does not keep them (docs/same_bits.md)"
        )
    return evidence.fault()


def describe(numbers: dict[str, float]) -> str:
    """Describe the comparison in one line."""
    if numbers["in_bits"]:
        return (
            f"{numbers['rows']:.0f} rows of trees have the bits of plain decoding, in batches of other shapes too "
            f"(with the mask off they differ by {numbers['control']:.2g})"
        )
    return (
        f"{numbers['rows']:.0f} rows of trees differ by {numbers['difference']:.2g} from plain decoding, bound "
        f"{numbers['bound']:.2g} (two plain runs: {numbers['plain']:.2g}, with the mask off: {numbers['control']:.2g})"
    )


def _run(driver: Driver) -> Evidence | str | None:
    """Return the evidence, the error instead of it, or None on a rank without logits.

    If it fails, other text is tried: a fault is there with any text, while rounding is seldom so large, and some text
    tells nothing about the mask.
    """
    devices = [] if driver.runner.device.type == "cpu" else [driver.runner.device]
    with torch.random.fork_rng(devices):
        for seed in range(MOST_TEXTS):
            proof = None
            try:
                proof = Proof(driver, seed)
                evidence = proof.run()
            except ProofFailed as error:
                return str(error)
            except (ConfigError, CannotProve):
                raise
            except Exception as error:  # of any part of the runner: trees do not run here
                logger.exception("vllm-specplug: the proof at start broke off")
                fault = f"{type(error).__name__}: {error}"
                return fault if proof is None or proof.has_read else f"{WITHOUT_TREES} raised {fault}"
            if any(_from_all_ranks(evidence is not None and evidence.is_final())):
                break
    fault = _fault_of_attention(driver) if isinstance(driver, DriverV1) else ""
    return fault or evidence


def _fault_of_attention(driver: Driver) -> str:
    try:
        return fault_of_attention(driver.runner)
    except Exception as error:
        logger.exception("vllm-specplug: the comparison of attention kernels broke off")
        return f"the comparison of attention kernels raised {type(error).__name__}: {error}"


def _from_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    group = get_world_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _from_first_rank(value: Any) -> Any:
    """Return the first rank's value on all ranks."""
    group = get_world_group()
    return value if group.world_size == 1 else group.broadcast_object(value, src=0)


def serve_plainly(driver: Driver) -> None:
    """Decode without trees from now on."""
    runner = driver.runner
    if isinstance(driver, DriverV1):
        for layer in get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase).values():
            if isinstance(impl := getattr(layer, "impl", None), TreeAttentionImpl) and not impl.local:
                impl.computes_all_rows = False  # the fault may be our kernel's
        runner.propose_draft_token_ids = no_drafts_v1(runner)
        return
    runner.serves_plainly = True
    execute, width = runner.execute_model, driver.speculator.trees.width

    def without_drafts(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's scheduler reserves rows for drafts: they are left out here, which it takes for rejected drafts."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts:
            rows = scheduler_output.num_scheduled_tokens
            rows = {name: count - len(drafts.get(name, ())) for name, count in rows.items()}
            total = sum(rows.values())
            scheduler_output = replace(
                scheduler_output,
                num_scheduled_tokens=rows,
                total_num_scheduled_tokens=total,
                scheduled_spec_decode_tokens={},
            )
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = without_drafts
    driver.speculator.propose = lambda input_batch, *_, **__: torch.zeros(
        input_batch.num_reqs, width - 1, dtype=torch.int64, device=runner.device
    )


# ---- facts that the proof depends on


def facts_of(runner: Any) -> dict[str, Any]:
    """Return the facts on which the result of a proof depends; they name the kept file."""
    config = runner.vllm_config
    options, parallel = config.speculative_config.specplug, config.parallel_config
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    impls = [getattr(layer, "impl", layer) for layer in layers]
    return {
        "model": config.model_config.model,
        "weights": fingerprint(runner.get_model()),
        "dtype": str(config.model_config.dtype),
        "kv cache": str(config.cache_config.cache_dtype),
        "pages": [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups],
        "method": options.method,
        "nodes": options.num_speculative_tokens,
        "depths": [getattr(part, "draft_depth", None) for part in parts_of(options)],
        "verification": options.verification,
        "attention": sorted({f"{type(one).__module__}.{type(one).__name__}" for one in impls}),
        "tree attention": options.tree_attention,
        "linear rows": options.linear_rows,
        "batch invariant": envs.VLLM_BATCH_INVARIANT,
        "operators": operators() is not None if current_platform.is_cpu() else None,
        "compilation": str(config.compilation_config.mode),
        "graphs": str(config.compilation_config.cudagraph_mode),
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "longest": [runner.max_model_len, runner.max_num_reqs],
        "device": cpu_name() if current_platform.is_cpu() else current_platform.get_device_name(),
        "threads": torch.get_num_threads() if current_platform.is_cpu() else 0,
        "vllm": " ".join(find_vllm()),
        "torch": torch.__version__,
        "plugin": f"{version_of('vllm-specplug')} {source_digest()}",
    }


def fingerprint(model: torch.nn.Module) -> str:
    """Return a digest of a few elements of each parameter, whatever its type."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().reshape(-1)
        places = torch.linspace(0, max(values.numel() - 1, 0), SAMPLES, dtype=torch.float64).long()
        sample = values[places.to(values.device)].cpu() if values.numel() else values.cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@functools.cache
def source_digest() -> str:
    """Return a digest of the plugin's code that computes trees."""
    root, digest = Path(vllm_specplug.__file__).parent, hashlib.sha256()
    for part in ("core", "cpu", "gpu", "vllm"):
        for path in sorted((root / part).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
