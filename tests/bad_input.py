"""Wrong commands, files, configurations and requests, and the table of what they are answered with.

python -m tests.bad_input --into docs/errors.md       # runs all but the requests, and writes the table
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.doubles import tiny
from vllm_specplug.cli import cli
from vllm_specplug.utils.tables import format_table

MARKS = ("<!-- errors -->", "<!-- /errors -->")
EAGLE = {"method": "eagle2", "model": "DIR/eagle"}


@dataclass(frozen=True)
class Case:
    """A wrong input.

    Attributes:
        given: a command line, a speculative config, or arguments of a request; ``DIR`` stands for ``write_files``'.
        says: a part of the message that names what was found or the fix.
    """

    given: Any
    says: str


#: Command lines after ``specplug``: one line on stderr, exit code 2.
COMMANDS = (
    Case("bogus", "invalid choice: 'bogus'"),
    Case("train", "arguments are required"),
    Case("demo --limit 99", "--limit must be from 1 to"),
    Case("demo --dtype int4", "invalid choice: 'int4'"),
    Case("demo --target DIR/nowhere", "there is no config.json"),
    Case("demo --speculative-config {x", "is not JSON"),
    Case("demo --speculative-config {}", "with the key 'method'"),
    Case("bench", "--questions FILE is needed"),
    Case("bench --questions DIR/nowhere.jsonl", "nowhere.jsonl: No such file"),
    Case("bench --questions DIR/text.txt", "not JSON"),
    Case("bench --questions DIR/questions.jsonl --methods plain,magic", "magic"),
    Case("bench --questions DIR/questions.jsonl --max-tokens 0", "--max-tokens must be at least 1"),
    Case("bench --questions DIR/questions.jsonl --target DIR/nowhere", "there is no config.json"),
    Case("bench --table DIR/nowhere.json", "cannot be read: No such file"),
    Case("bench --table DIR/text.txt", "is not one JSON object"),
    Case("top http://127.0.0.1:1", "Connection refused"),
    Case("inspect DIR/nowhere", "does not exist"),
    Case("inspect DIR/empty", "has no config.json"),
    Case("inspect DIR/truncated", "truncated"),
    Case("data --target DIR/nowhere --prompts DIR/questions.jsonl --out DIR/data", "nowhere"),
    Case("data --target DIR/target --prompts DIR/text.txt --out DIR/data", "text.txt"),
    Case("train hass --target DIR/target --out DIR/out --lr -1", "--lr must be above 0"),
    Case("train hass --target DIR/target --out DIR/out", "give --prompts"),
    Case("train medusa --target DIR/target --out DIR/out --lr fast", "invalid float value: 'fast'"),
)

#: Configurations: the engine does not start, and ``vllm serve`` ends with the message and exit code 1.
CONFIGS = (
    Case({"method": "eagel2", "model": "DIR/eagle"}, "did you mean 'eagle2'"),
    Case({"model": "smollm2-135m-instruct"}, "add the key 'method'"),
    Case({"method": "eagle2"}, "needs 'model'"),
    Case(EAGLE | {"draft_dept": 4}, "did you mean 'draft_depth'"),
    Case(EAGLE | {"quantization": "awq"}, "VLLM_PLUGINS=''"),
    Case(EAGLE | {"num_speculative_tokens": 1000}, "choose 1 to 255"),
    Case(EAGLE | {"draft_depth": "six"}, "must be an integer"),
    Case(EAGLE | {"draft_top_k": 1, "draft_depth": 2, "num_speculative_tokens": 9}, "raise draft_depth or draft_top_k"),
    Case(EAGLE | {"budget": "large"}, "choose one of measured, fixed"),
    Case(EAGLE | {"verification": "rejection", "budget": "measured"}, "needs budget='fixed'"),
    Case(EAGLE | {"trace_trees": "DIR/nowhere/trees.jsonl"}, "create its folder first"),
    Case({"method": "eagle2", "model": "DIR/nowhere"}, "does not exist"),
    Case({"method": "eagle2", "model": "DIR/empty"}, "has no config.json"),
    Case({"method": "eagle2", "model": "DIR/truncated"}, "truncated"),
    Case({"method": "eagle2", "model": "DIR/other"}, "hidden size 128, the target 64"),
    Case({"method": "eagle2", "model": "DIR/eagle3"}, "[1, 15, 27]: the target has 2 layers"),
    Case({"method": "eagle2", "model": "DIR/target"}, "is this the target's own folder?"),
    Case({"method": "draft_tree", "model": "DIR/nowhere"}, "does not exist"),
    Case({"method": "draft_tree", "model": "DIR/eagle"}, "the method 'eagle2' serves it"),
    Case({"method": "draft_tree", "model": "DIR/foreign"}, "157 token ids mean other tokens ('Ġ', '!', '\"', ...)"),
    Case(
        {"method": "dflash_tree", "model": "DIR/eagle"},
        "needs a DFlash, DSpark or P-EAGLE head: the method 'eagle2' serves it",
    ),
    Case({"method": "medusa", "model": "DIR/eagle"}, "the method 'eagle2' serves it"),
    Case({"method": "swift", "skip_ratio": 0}, "choose 0.01 to 0.8"),
    Case({"method": "lookup", "min_match": 9}, "'min_match' was removed"),
    Case({"method": "union", "sources": []}, "list of 1 to 4 sources"),
    Case({"method": "union", "sources": [{"method": "lookup"}, {"method": "lookup"}]}, "is given twice"),
    Case({"method": "union", "sources": [EAGLE, {"method": "swift"}]}, "only one of them may be a drafter"),
)

#: Arguments of a request (``vllm_xargs``): status 400, and the server goes on.
REQUESTS = (
    Case({"speculation": "maybe"}, "speculation must be true or false, not 'maybe'"),
    Case({"typical_epsilon": -1}, "this server verifies drafts exactly"),
    Case({"swift_stream": "code"}, "swift_stream was removed"),
    Case({"speculaton": False}, "unknown argument 'speculaton': did you mean 'speculation'?"),
)


def write_files(folder: Path) -> None:
    """Write what the cases name."""
    tiny.write_tokenizer(tiny.write_target(folder / "target"))
    sibling = tiny.write_sibling(folder / "foreign", folder / "target")
    tiny.write_tokenizer(sibling)
    tokenizer = json.loads((sibling / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"].items()
    tokenizer["model"]["vocab"] = {name if number < 3 else f"{name}?": number for name, number in vocabulary}
    (sibling / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny.write_drafter(folder / "eagle")
    shutil.copytree(folder / "eagle", folder / "truncated")
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    shutil.copytree(folder / "eagle", folder / "other")
    config = json.loads((folder / "eagle" / "config.json").read_text())
    (folder / "other" / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    config = json.loads((tiny.write_eagle3_drafter(folder / "eagle3") / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 15, 27]
    (folder / "eagle3" / "config.json").write_text(json.dumps(config))
    (folder / "empty").mkdir()
    (folder / "questions.jsonl").write_text('{"question": "1 + 1?"}\n')
    (folder / "text.txt").write_text("plain text\n")


def run_command(given: str, folder: Path) -> tuple[str, int]:
    """Return the last line on stderr and the exit code."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main(given.replace("DIR", str(folder)).split())
        except SystemExit as stop:
            code = int(stop.code or 0)
    return errors.getvalue().strip().splitlines()[-1].replace(str(folder), "DIR"), code


def configure(given: dict[str, Any], folder: Path) -> str:
    """Return the message with which vLLM refuses to configure an engine."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = json.loads(json.dumps(given).replace("DIR", str(folder)))
    target = str(folder / "target")
    try:
        EngineArgs(target, dtype="float32", max_model_len=256, speculative_config=speculative).create_engine_config()
    except ValueError as error:
        return str(error).replace(str(folder), "DIR")
    return "no error"


def table(folder: Path) -> str:
    """Run commands and configurations; return the table in Markdown."""
    quoted: Callable[[Any], str] = lambda given: "`" + (given if isinstance(given, str) else json.dumps(given)) + "`"  # noqa: E731
    rows = []
    for case in COMMANDS:
        message, code = run_command(case.given, folder)
        rows.append([quoted(f"specplug {case.given}"), _cell(message), f"exit code {code}"])
    rows += [[quoted(case.given), _cell(configure(case.given, folder)), "no start"] for case in CONFIGS]
    rows += [[quoted(case.given), _cell(case.says), "status 400"] for case in REQUESTS]
    return format_table(["given", "answered", "ends with"], rows, markdown=True)


def _cell(message: str) -> str:
    """One line; without the prefix of vLLM's configuration errors."""
    text = re.sub(r"\s+", " ", message).replace("|", "\\|")
    return text.removeprefix("specplug: error: ")


def main() -> None:
    from vllm_specplug.bench.results import write_table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        write_table(table(Path(name)), args.into, MARKS)


if __name__ == "__main__":
    main()
