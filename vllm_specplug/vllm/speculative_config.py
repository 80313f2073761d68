"""Our options as one of vLLM's SpeculativeConfig objects, so that vLLM loads and schedules the drafter itself."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_specplug.config import (
    ALL_ROWS,
    ConfigError,
    TreeOptions,
    model_drafter,
    parse_options,
    parts_of,
    with_drafter,
)
from vllm_specplug.cpu.kernels.cpu_ops import build_beside
from vllm_specplug.gpu.rounds import with_defaults
from vllm_specplug.proposer import DrafterConfig, find_method
from vllm_specplug.proposers.dflash.checkpoint import PAIRS_ARCHITECTURE
from vllm_specplug.utils.environment import has_amx, has_avx2, has_vnni, multiplies_bytes
from vllm_specplug.utils.metrics import publish
from vllm_specplug.utils.published import is_published
from vllm_specplug.vllm.check import REFERENCE_VERSION, check_runner, check_symbols, describe_tests
from vllm_specplug.vllm.drafters.draft_model import check_draft_model
from vllm_specplug.vllm.drafters.mtp import check_class, fit_modules, has_layers
from vllm_specplug.vllm.drafters.setup import target_info
from vllm_specplug.vllm.features import (
    V2_NAME,
    WORKERS,
    Setting,
    check_features,
    check_lockstep,
    check_options,
    check_tree_attention,
    uses_v2_runner,
)
from vllm_specplug.vllm.manifest import MANIFEST_DRAFTERS, MANIFEST_RELOAD
from vllm_specplug.vllm.mixed import path_of_mixed, users_class
from vllm_specplug.vllm.sources import installed_sources

logger = logging.getLogger("vllm_specplug")

#: Class that vLLM's ``custom_class`` method loads on V1.  Our runner puts the method's own adapter in its place.
NO_DRAFTER = "vllm_specplug.cpu.drafters.base.V1Drafter"

#: vLLM's method for V2 speculators without a draft model: no draft KV, and asynchronous scheduling stays on.
V2_WITHOUT_DRAFTER = "ngram_gpu"

#: The draft architecture that replaces vLLM's: it adds draft vocabularies and ``fc.bias``.
EAGLE_ARCHITECTURE = "SpecPlugEagleForCausalLM"
EAGLE_MODEL = "vllm_specplug.vllm.drafters.eagle_model:SpecPlugEagleForCausalLM"
#: vLLM's class of DFlash 2.
PAIRS_MODEL = "vllm.model_executor.models.qwen3_dflash2:DFlash2Qwen3ForCausalLM"


@config
class TreeSpeculativeConfig(SpeculativeConfig):
    """vLLM's configuration of its method that loads the drafter, or of a custom drafter, with our options beside it.

    vLLM treats it as those methods: it loads the drafter, gives it paged KV in the prefix cache and reserves
    lookahead slots.  The class is importable and picklable, because it is sent to the engine core and the workers.
    """

    specplug: Any = None
    """Options of our method (a ``TreeOptions``)."""

    v2_runner: bool = False
    """Whether vLLM's V2 model runner runs the trees."""

    has_users_graph_sizes: bool = False
    """Whether the user chose vLLM's CUDA graph capture sizes; they are kept then."""

    draft_entries: Any = None
    """Entries of the draft model's config, see ``DrafterConfig.config_entries``."""

    metrics_file: str | None = None
    """File in which the worker counts for ``/metrics``, see ``metrics.publish``."""

    published_head: str | None = None
    """Folder in which versions of the drafter are published; None: its weights stay as they are."""

    published_folder: str | None = None
    """The version in it that is loaded at start."""

    trainer: tuple[str, ...] = ()
    """Command line of the trainer that runs beside the server."""

    def __repr__(self) -> str:
        # vLLM logs it at each start.  A dataclass would print the whole configurations of drafter and target.
        return f"TreeSpeculativeConfig({self.specplug!r})"

    def compute_hash(self) -> str:
        # The attention of the compiled model is ours: an engine without our methods must not take it from a cache.
        in_int8 = getattr(model_drafter(self.specplug), "draft_int8", False)
        kinds = f"{'int8-' if in_int8 else ''}{f'rows{rows}-' if (rows := self.specplug.linear_rows) else ''}"
        return f"specplug-{kinds}{super().compute_hash()}"

    def __post_init__(self):
        asked = self.method
        result = super().__post_init__()
        if asked in ("mtp", "draft_model") and self.method != asked:
            cause = "because of a word in the path: rename the folder"
            if self.method == "mtp":
                cause = "because its config names MTP layers: use another model, or the method eagle2 or lookup"
            raise ConfigError(
                f"vLLM takes {self.draft_model_config.model!r} for a drafter of its method {self.method!r}, {cause}"
            )
        _register_model()
        if self.method == "mtp":
            check_class(self)
        entries = {"architectures": [EAGLE_ARCHITECTURE]} if self.method == "eagle" else {}
        entries |= self.draft_entries or {}
        for key, value in entries.items():
            setattr(self.draft_model_config.hf_config, key, value)
        if entries:
            self.update_arch_()
        if asked == "dspark" and not self.v2_runner:
            self.method = "dflash"  # vLLM's V1 runner has no method for it; its DFlash proposer runs the same forward
        return result

    @cached_property
    def max_num_new_slots_for_drafting(self) -> int:
        """Return the rows that vLLM's proposer adds to those of each request; a DFlash block is no part of them."""
        return int(self.uses_draft_model())

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """Do nothing: ``check_draft_model`` compares the tokens, and accepts padded vocabularies."""

    def use_multi_module_mtp(self) -> bool:
        """Return False: the first MTP module drafts all levels, so prompts are read as for one module."""
        return False

    def use_ngram(self) -> bool:
        """Return whether V2 must keep all tokens in device memory: model-free proposers read them there."""
        return any(find_method(part.method).make_on_device is not None for part in parts_of(self.specplug))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled in the engine core and the workers, whose registries need the drafter too.
        _register_model()
        self.__dict__.update(state)


def _register_model() -> None:
    from vllm import ModelRegistry

    for name, model in ((EAGLE_ARCHITECTURE, EAGLE_MODEL), (PAIRS_ARCHITECTURE, PAIRS_MODEL)):
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, model)


def _max_num_seqs(engine_args: Any, parallel_config: Any) -> int:
    """Return the most requests that run at once; vLLM has not set its default yet, which depends on the use."""
    if engine_args.max_num_seqs is not None:
        return int(engine_args.max_num_seqs)
    return max(engine_args.get_batch_defaults(parallel_config.world_size)[1].values())


def build(
    given: dict[str, Any], target_model_config: Any, target_parallel_config: Any, engine_args: Any
) -> TreeSpeculativeConfig:
    """Validate everything that is known before the engine starts, and build vLLM's configuration.

    Raises:
        ConfigError, CheckpointError: with the fix in the message.
    """
    given = {key.replace("-", "_"): value for key, value in given.items()}
    _check_keys(given)
    in_lockstep = Setting(target_model_config, target_parallel_config, engine_args).in_lockstep
    given, trainer = _chosen(given, target_model_config, in_lockstep)
    options, on_cpu = parse_options(given), current_platform.is_cpu()
    v2 = uses_v2_runner(options)
    setting = Setting(target_model_config, target_parallel_config, engine_args, v2)
    if v2:
        options = _with_v2_defaults(given, options, setting)
    _check_vllm(options, on_cpu, v2)
    check_features(options.method, setting)
    check_tree_attention(options, setting)
    if v2:
        _check_v2_options(options)
    _check_connector(options, engine_args.kv_transfer_config)
    if options.linear_rows is None:
        gains = on_cpu and not v2 and has_avx2()
        options = replace(options, linear_rows=ALL_ROWS if gains else 0)
    _check_batch_invariance(options, on_cpu, v2)
    drafter = _configure_drafter(options, target_model_config)
    head, folder = _published(options, drafter) if options.reload else (None, None)
    if drafter is not None:
        options = _fitted(options, drafter, target_model_config, on_cpu, v2)
    loaded = _loaded_by_vllm(options, drafter, target_model_config, v2)
    if on_cpu and not v2:
        build_beside()
    target_parallel_config.worker_cls = _mixed(setting.worker, target_parallel_config.worker_cls)
    engine_args.scheduler_cls = _mixed(setting.scheduler, engine_args.scheduler_cls)
    config = TreeSpeculativeConfig(
        **loaded,
        num_speculative_tokens=options.num_speculative_tokens,
        # V1's drafter selects its inputs by path rows, after the walk; vLLM's padded batch assumes flat prefixes.
        # (On V2 the rows themselves are brought into path order.)
        disable_padded_drafter_batch=not v2,
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
        specplug=options,
        draft_entries=drafter.config_entries if drafter is not None else None,
        v2_runner=v2,
        has_users_graph_sizes=_chooses_graph_sizes(engine_args),
        metrics_file=publish(target_parallel_config.data_parallel_size),
        published_head=head,
        published_folder=folder,
        trainer=(sys.executable, "-m", "vllm_specplug.cli.cli", *trainer) if trainer else (),
    )
    if loaded["method"] == "draft_model":
        check_draft_model(config)
    if setting.in_lockstep:
        check_lockstep(options, None if loaded["method"] == V2_WITHOUT_DRAFTER else config.draft_model_config, setting)
    return config


def _with_v2_defaults(given: dict[str, Any], options: TreeOptions, setting: Setting) -> TreeOptions:
    """Return the options with the budget and the size of trees that the V2 runner has by default."""
    why_fixed = _why_fixed(options, setting)
    budget = "measured" if why_fixed is None else "fixed"
    max_num_seqs = _max_num_seqs(setting.engine_args, setting.parallel_config)
    options = parse_options(with_defaults(given, budget, max_num_seqs))
    if why_fixed is not None and "budget" not in given:
        logger.info(
            "vllm-specplug: budget='fixed' with num_speculative_tokens=%d (%s); with many requests use fewer",
            options.num_speculative_tokens,
            why_fixed,
        )
    return options


def _fitted(options: TreeOptions, drafter: DrafterConfig, target: Any, on_cpu: bool, v2: bool) -> TreeOptions:
    """Return the options with what depends on the drafter's checkpoint.

    Raises:
        ConfigError: the drafter cannot do what they ask.
    """
    _check_record(drafter)
    in_tiles = options.linear_rows == ALL_ROWS and has_amx()
    by_default = target.dtype == torch.bfloat16 and has_vnni() and not in_tiles
    options = with_drafter(
        options, _resolve_int8(drafter.options, on_cpu and not v2 and drafter.supports_int8, by_default)
    )
    if drafter.vllm_method == "mtp" and drafter.model is None:
        return fit_modules(options, target, v2)
    return options


def _loaded_by_vllm(options: TreeOptions, drafter: DrafterConfig | None, target: Any, v2: bool) -> dict[str, Any]:
    """Return vLLM's method and what it loads as the drafter.

    Raises:
        ConfigError: this vLLM lacks the drafter's class.
    """
    method, model = (drafter.vllm_method, drafter.model) if drafter is not None else ("custom_class", None)
    _check_class(options.method, method, v2)
    if method == "custom_class":
        return {"method": V2_WITHOUT_DRAFTER} if v2 else {"method": method, "model": NO_DRAFTER}
    revisions = {}
    if method == "mtp" and model is None:  # its layers are in the target's checkpoint
        revisions = {name: getattr(target, name) for name in ("revision", "code_revision")}
    return {"method": method, "model": model, **revisions}


def _mixed(ours: str, given: Any) -> str:
    """Return the path of our class, mixed into the user's if there is one."""
    theirs = users_class(given)
    return path_of_mixed(ours, theirs) if theirs else ours


def _chooses_graph_sizes(engine_args: Any) -> bool:
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    settings = (engine_args, engine_args.compilation_config)
    return any(getattr(setting, name, None) is not None for setting in settings for name in names)


def _check_keys(given: dict[str, Any]) -> None:
    """Refuse keys that only vLLM's own method of the same name has.

    Raises:
        ConfigError: saying how to get vLLM's method.
    """
    ours = {field.name for field in fields(find_method(given["method"]).options)}
    theirs = sorted((set(given) - ours - {"method"}) & {field.name for field in fields(SpeculativeConfig)})
    if theirs:
        raise ConfigError(
            f"the installed plugin vllm-specplug serves the method {given['method']!r}, without vLLM's key "
            f"{', '.join(map(repr, theirs))}: leave it out, or set the environment variable VLLM_PLUGINS='' to get "
            "vLLM's own method"
        )


def _chosen(given: dict[str, Any], target: Any, in_lockstep: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Replace ``auto`` by the method that it has chosen, and say why; return the trainer's command line too.

    A budget that is not given is that of the chosen method; replicas in lockstep have a fixed one.
    """
    options = parse_options(given)
    if (choose := find_method(options.method).choose) is None:
        return given, ()
    v2 = uses_v2_runner(options)
    fixed_by_default = v2 and in_lockstep and given.get("budget", "auto") == "auto"
    if fixed_by_default:
        options = replace(options, budget="fixed")
    info = replace(target_info(target), has_mtp_layers=has_layers(target, v2))
    choice = choose(options, info, target.model, current_platform.is_cpu())
    logger.info(
        "vllm-specplug: method %r uses %s; it stands for %s", options.method, choice.why, json.dumps(choice.config)
    )
    config = {key: value for key, value in choice.config.items() if not (fixed_by_default and key == "budget")}
    sizes = {name: given[name] for name in ("num_speculative_tokens",) if name in given}
    return {**config, **sizes}, choice.trainer


def _check_vllm(options: TreeOptions, on_cpu: bool, v2: bool) -> None:
    model_runner = "V2" if v2 else "V1"
    if on_cpu and v2 and (on_cpu, v2) not in WORKERS:
        raise ConfigError("trees run on vLLM's V2 model runner on CUDA only: set VLLM_USE_V2_MODEL_RUNNER=0 on a CPU")
    if not on_cpu and not v2:
        if envs.VLLM_USE_V2_MODEL_RUNNER is None:
            check_options(options)  # names methods for which vLLM chooses V2
        raise ConfigError("on CUDA, trees run on vLLM's V2 model runner only: unset VLLM_USE_V2_MODEL_RUNNER")
    # Read from source files: the server's front end needs none of the runner's modules.
    report = check_runner(model_runner, installed_sources().problem)
    found = f"{report.distribution} {report.version}"
    if not report.supported:
        raise ConfigError(
            f"method {options.method!r} cannot run on {found}, {model_runner} runner: {'; '.join(report.problems)}. "
            f"Install {report.distribution} {REFERENCE_VERSION} or a vllm-specplug for this version"
        )
    logger.info("%s has all that the plugin builds on; %s", found, describe_tests(report.version, model_runner, on_cpu))


def _check_class(method: str, vllm_method: str, v2: bool) -> None:
    """Refuse a method whose drafter's class this vLLM lacks.

    Raises:
        ConfigError: naming the missing key.
    """
    report = check_symbols(MANIFEST_DRAFTERS.get((vllm_method, v2), ()), installed_sources().problem)
    if not report.supported:
        raise ConfigError(
            f"method {method!r} cannot run on {report.distribution} {report.version}: {'; '.join(report.problems)}. "
            f"Install {report.distribution} {REFERENCE_VERSION}, or use the method eagle2 or lookup"
        )


def _check_batch_invariance(options: TreeOptions, on_cpu: bool, v2: bool) -> None:
    """Keep what ``VLLM_BATCH_INVARIANT=1`` promises, or deny it: see docs/same_bits.md."""
    if not envs.VLLM_BATCH_INVARIANT:
        return
    if v2:
        logger.warning(
            "VLLM_BATCH_INVARIANT=1: on %s trees are computed by another kernel than other rows: drafts can change "
            "texts in 16 bits",
            V2_NAME,
        )
    elif on_cpu and options.linear_rows != ALL_ROWS:
        raise ConfigError(
            f"VLLM_BATCH_INVARIANT=1 needs linear_rows='all' and a CPU with AVX2 (found linear_rows="
            f"{options.linear_rows!r}): vLLM's products depend on the number of rows; leave one of both out"
        )


def _check_v2_options(options: TreeOptions) -> None:
    if options.linear_rows:
        raise ConfigError(
            f"linear_rows={options.linear_rows} is for the V1 runner on a CPU (found {V2_NAME}): leave it out"
        )
    check_options(options)


def _check_record(drafter: DrafterConfig) -> None:
    if drafter.vllm_method == "eagle3" and getattr(drafter.options, "record", None) is not None:
        raise ConfigError(
            f"record={drafter.options.record!r}: the hidden states that EAGLE-3 heads read are not recorded: leave "
            "record out, or use an EAGLE-1/2 or HASS head"
        )


def _stores_drafter(options: TreeOptions, kv_transfer_config: Any) -> bool:
    """Return whether a KV connector stores the drafter's rows too."""
    drafter = model_drafter(options)
    return kv_transfer_config is not None and drafter is not None and find_method(drafter.method).model.is_vllm_model


def _why_fixed(options: TreeOptions, setting: Setting) -> str | None:
    """Return why the default budget of the V2 runner is a fixed one; None if it is measured."""
    if setting.in_lockstep:
        return "replicas that share experts verify trees of one size"
    if _stores_drafter(options, setting.engine_args.kv_transfer_config):
        return "a KV connector stores the drafter's rows, so the drafter must read every prompt"
    return None


def _check_connector(options: TreeOptions, kv_transfer_config: Any) -> None:
    if not _stores_drafter(options, kv_transfer_config):
        return
    drafter = model_drafter(options)
    if options is not drafter or options.budget == "measured":
        name, found = getattr(drafter, "model", drafter.method), f"method={options.method!r}, budget={options.budget!r}"
        raise ConfigError(
            f"with a KV connector drafter {name!r} must read every prompt, as its rows are stored too "
            f"(found {found}): use method {drafter.method!r} with budget='fixed', or a method without an EAGLE drafter"
        )


def _configure_drafter(options: TreeOptions, target: Any) -> DrafterConfig | None:
    """Let the method check its drafter with weights against the target; None for a model-free method."""
    given = model_drafter(options)
    if given is None:
        return None
    return find_method(given.method).model.configure(given, target_info(target))


def _published(options: TreeOptions, drafter: DrafterConfig | None) -> tuple[str, str]:
    """Return the folder that the drafter was published in, and the version that was resolved.

    Raises:
        ConfigError: there is none, or this vLLM cannot take other weights.
    """
    own = model_drafter(options)
    if own is not None and getattr(own, "model", None) is None:
        raise ConfigError(
            f"reload=true needs a drafter in a folder of its own, but {own.method!r} drafts with the target's weights: "
            "leave reload out"
        )
    given, folder = getattr(own, "model", None), None
    if drafter is not None and given is not None and is_published(Path(given).expanduser()):
        folder = drafter.model or drafter.options.model
    if folder is None:
        raise ConfigError(
            f"reload=true needs a drafter in a folder that `specplug learn` publishes in (found model={given!r}): give "
            "that folder as 'model', or leave reload out"
        )
    if drafter.model is not None and not (report := check_symbols(MANIFEST_RELOAD)).supported:
        raise ConfigError(f"reload=true cannot be used: {'; '.join(report.problems)}; leave it out")
    return str(Path(given).expanduser().absolute()), folder


def _resolve_int8(options: TreeOptions, is_supported: bool, by_default: bool) -> TreeOptions:
    """Decide ``draft_int8``: as asked, else whether it is supported and the default."""
    if not hasattr(options, "draft_int8"):
        return options
    asked, possible = options.draft_int8, is_supported and multiplies_bytes()
    if asked and not possible:
        raise ConfigError(
            "draft_int8=true needs the V1 runner on an x86 CPU with VNNI, or with AVX2 and without AVX-512, and "
            "an EAGLE-1/2, HASS or Medusa drafter: leave it out"
        )
    return replace(options, draft_int8=possible and by_default if asked is None else asked)
