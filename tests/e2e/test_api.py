"""The host's HTTP API with real requests: a server with draft trees answers as the plain one does, also under stress.

Both serve the tiny random model in float32 and take adapters; the one with trees has KV space for part of the traffic.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from benchmarks.end_to_end import stress
from tests import bad_input
from tests.doubles import tiny
from tests.doubles.adapters import write_adapter
from tests.doubles.servers import post_json, tree_server
from tests.host_versions import DROPS_TOKENS_BEHIND_STOPS, MASKS_ALLOWED_TOKENS_OF_EACH_REQUEST
from vllm_specplug.cli import cli
from vllm_specplug.cli.server_process import Server, read_counter

CONCURRENCY = 32
#: Tool calls need a parser; without white space every object ends within some tokens.
OPTIONS = (
    *("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
PATHS = ("/v1/completions", "/v1/chat/completions")
SETTINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "n": {"temperature": 0.9, "seed": 12, "n": 3},
    "min_p, penalties, bias": {
        "temperature": 0.9, "seed": 13, "min_p": 0.05, "presence_penalty": 0.5, "logit_bias": {"40": 2.0}
    },
    "stop": {"temperature": 0.9, "seed": 14, "stop": ["a", "7"]},
}  # fmt: skip


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "strict": True,  # else the host holds the model to a call, and not its arguments to the schema
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[dict[str, Server]]:
    folder, monkeypatch = tmp_path_factory.mktemp("api"), pytest.MonkeyPatch()
    speculative = stress.write_models(folder)["eagle2"]
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with stress.pair_of_servers(folder, speculative, CONCURRENCY, OPTIONS) as (trees, plain):
        monkeypatch.undo()
        yield {"trees": trees, "plain": plain}


def post(server: Server, path: str, **body) -> urllib.request.Request:
    request = urllib.request.Request(
        server.url + path, json.dumps({"model": "demo", **body}).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


def ask(server: Server, path: str, **body) -> list[dict]:
    """The choices of a reply, or the texts of a streamed one."""
    if not body.get("stream"):
        try:
            return json.load(post(server, path, **body))["choices"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
    texts: dict[int, list] = {}
    with post(server, path, **body) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    found = texts.setdefault(choice["index"], ["", None])
                    found[0] += text
                    found[1] = choice.get("finish_reason") or found[1]
    return [dict(zip(("text", "finish_reason"), texts[index], strict=True)) for index in sorted(texts)]


def prompt_of(path: str, text: str = "count the green lights, then tell a story") -> dict:
    return {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("path", PATHS)
def test_whole_and_streamed(servers, path, settings):
    body = {**prompt_of(path), **SETTINGS[settings], "max_tokens": 40}
    whole = [ask(servers[name], path, **body) for name in ("trees", "plain")]
    assert whole[0] == whole[1]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in whole[0]]
    assert len(texts) == body.get("n", 1) and all(texts)
    streamed = ask(servers["trees"], path, **body, stream=True)
    assert [choice["text"] for choice in streamed] == texts
    assert [choice["finish_reason"] for choice in streamed] == [choice["finish_reason"] for choice in whole[0]]


@pytest.mark.parametrize("case", bad_input.REQUESTS, ids=lambda case: "".join(case.given))
@pytest.mark.parametrize("path", PATHS)
def test_a_bad_argument_is_answered_400_with_the_reason(servers, path, case):
    body = {**prompt_of(path), "max_tokens": 4, "vllm_xargs": case.given}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(servers["trees"], path, **body)
    assert refused.value.code == 400
    assert case.says in json.loads(refused.value.read())["error"]["message"]
    # vLLM has begun its reply to a streamed request before an engine sees it: the error is the stream's first event.
    with post(servers["trees"], path, **body, stream=True) as reply:
        events = [json.loads(line[6:]) for line in reply if line.startswith(b"data: {")]
    assert events[0]["error"]["code"] == 400 and case.says in events[0]["error"]["message"]


def test_arguments_of_other_plugins_are_left_alone(servers):
    body = {**prompt_of("/v1/completions"), "max_tokens": 8, "temperature": 0}
    expected = ask(servers["plain"], "/v1/completions", **body)
    assert ask(servers["trees"], "/v1/completions", **body, vllm_xargs={"watermark_key": 7}) == expected


@pytest.mark.parametrize("path", PATHS)
def test_logprobs(servers, path):
    wanted = {"logprobs": 3} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 3}
    body = {**prompt_of(path), **wanted, "max_tokens": 20, "temperature": 0.8, "seed": 4}
    both = (ask(servers[name], path, **body)[0]["logprobs"] for name in ("trees", "plain"))
    found, expected = (list(stress.numbers(logprobs)) for logprobs in both)
    assert found == pytest.approx(expected, abs=1e-4)
    assert len(found) > 60


def calls_of(message: dict) -> list[dict]:
    """Names and arguments; the ids are random."""
    return [call["function"] for call in message["tool_calls"]]


def streamed_calls(server: Server, body: dict) -> list[dict]:
    """The same, put together from a stream."""
    calls: dict[int, dict] = {}
    with post(server, "/v1/chat/completions", **body, stream=True) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for part in json.loads(line[6:])["choices"][0]["delta"].get("tool_calls") or ():
                    call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                    for key in call:
                        call[key] += part["function"].get(key) or ""
    return [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize("choice", ["named", "required"])
def test_tool_call(servers, choice):
    """Its arguments follow the JSON schema, whole and streamed."""
    named = {"type": "function", "function": {"name": "look_up"}}
    body = {**prompt_of("chat"), "tools": [TOOL], "tool_choice": named if choice == "named" else choice}
    # The grammar of calls leaves white space free, and further calls: neither is liked, so that the answer ends.
    body |= {"max_tokens": 160, "logit_bias": {"2": 8.0, "3": -20.0}}
    for settings in ({"temperature": 0}, {"temperature": 0.9, "seed": 5}):
        body |= settings
        whole = [ask(servers[name], "/v1/chat/completions", **body)[0] for name in ("trees", "plain")]
        found, expected = (calls_of(one["message"]) for one in whole)
        assert found == expected and whole[0]["finish_reason"] == whole[1]["finish_reason"]
        assert [call["name"] for call in found] == ["look_up"] * len(found) and found
        for call in found:
            jsonschema.validate(json.loads(call["arguments"]), TOOL["function"]["parameters"])
        streamed = streamed_calls(servers["trees"], body)
        assert streamed == streamed_calls(servers["plain"], body)
        # The host's two ways differ in white space.
        assert [json.loads(one["arguments"]) for one in streamed] == [json.loads(one["arguments"]) for one in found]


def test_tools_are_left_to_the_model(servers):
    body = {**prompt_of("chat"), "tools": [TOOL], "max_tokens": 30, "temperature": 0.9, "seed": 3}
    found, expected = (ask(servers[name], "/v1/chat/completions", **body) for name in ("trees", "plain"))
    assert found == expected


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.7, "seed": 6}], ids=["greedy", "seeded"])
def test_json_schema(servers, settings):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": stress.SCHEMA}}
    body = {**prompt_of("chat"), "response_format": schema, "max_tokens": 90, **settings}
    found, expected = (ask(servers[name], "/v1/chat/completions", **body)[0] for name in ("trees", "plain"))
    assert found == expected
    jsonschema.validate(json.loads(found["message"]["content"]), stress.SCHEMA)
    (streamed,) = ask(servers["trees"], "/v1/chat/completions", **body, stream=True)
    assert streamed == {"text": found["message"]["content"], "finish_reason": "stop"}


def test_bad_requests_are_refused_as_by_the_plain_server(servers):
    for body in ({"temperature": -1}, {"top_p": 2.0}, {"max_tokens": 10**6}, {"logit_bias": {"100000": 1.0}}):
        answers = []
        for server in servers.values():
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(server, "/v1/completions", prompt="a", **body)
            answers.append((refused.value.code, json.load(refused.value)["error"]["message"]))
        assert answers[0] == answers[1] and answers[0][0] == 400


@pytest.mark.wide
def test_bad_configuration_ends_before_the_server_starts(tmp_path):
    speculative = {"method": "eagle2", "model": "smollm2-135m-instruct", "draft_dept": 4}
    process = tree_server(tiny.write_target(tmp_path / "target"), speculative, tmp_path / "log").process
    assert process.wait(timeout=120) != 0
    assert "unknown key 'draft_dept'" in (tmp_path / "log").read_text()


def test_abort_in_the_middle_of_a_stream(servers):
    """The client leaves: the server stops, has nothing left of the request, and answers the next ones as ever."""

    def figure(name: str) -> float:
        with urllib.request.urlopen(f"{servers['trees'].url}/metrics", timeout=30) as reply:
            return read_counter(reply.read().decode(), name)

    before = figure("vllm:generation_tokens_total")
    # Many answers, so that they are not at their end when a busy machine comes to look.
    body = {"max_tokens": 240, "ignore_eos": True, "temperature": 0.9, "seed": 1, "n": 14, "stream": True}
    replies = [post(servers["trees"], path, **prompt_of(path, "a"), **body) for path in PATHS]
    for reply in replies:
        assert reply.readline().startswith(b"data: {")
    assert figure("vllm:num_requests_running") > 0
    for reply in replies:
        reply.close()
    figures = stress.settle(servers["trees"])
    assert [figures[name] for name in stress.AT_REST] == [0, 0, 0]
    assert figure("specplug:steps_total") > 0
    assert 0 < figure("vllm:generation_tokens_total") - before < 240 * 14 * len(PATHS)  # they did not end by themselves
    for i in range(4):
        body = {"prompt": "next one" * i + "a", "max_tokens": 30, "temperature": 0}
        assert ask(servers["trees"], PATHS[0], **body) == ask(servers["plain"], PATHS[0], **body)


def bench(folder: Path, plain: str, trees: str) -> tuple[dict, float]:
    """What ``specplug bench`` says about two servers, and the seconds it ran."""
    questions, out = folder / "q.jsonl", folder / "out.json"
    asked = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"count the lights {i}"]} for i in range(4)]
    questions.write_text("\n".join(map(json.dumps, asked)))
    command = ["bench", "--questions", str(questions), "--max-tokens", "24", "--concurrency", "1,2"]
    start = time.perf_counter()
    servers = [f"no-drafts={trees}", f"trees={trees}"]
    servers = [part for server in (plain, *servers) for part in ("--server", server)]
    assert cli.main([*command, *servers, "--out", str(out)]) == 0
    return json.loads(out.read_text())["methods"], time.perf_counter() - start


def check_bench(found: dict) -> None:
    """The same tokens from all, drafts only where wanted, every question in its place, and times that add up."""
    plain, undrafted, trees = (found[name]["overall"] for name in ("plain", "no-drafts", "trees"))
    assert trees["agree"] == plain["agree"] == plain["questions"] == 4 and trees["tokens"] == plain["tokens"] > 40
    assert trees["agree_without_drafts"] == undrafted["agree"] == 4
    assert plain["tau"] is None and plain["acceptance_by_depth"] == [] and undrafted["tau"] is None
    assert (trees["tau"] or 1) > 1 and trees["acceptance_by_depth"][0] > 0
    # Every token is of the prompt's step, of a step without a draft, or of a draft's.
    for batch in found["trees"]["batches"]:
        assert batch["drafts"] + batch["accepted"] <= batch["tokens"] and batch["accepted"] > 0
    for method in found.values():
        assert [batch["questions"] for batch in method["batches"]] == [["0"], ["1"], ["2"], ["3"], ["0", "1", "2", "3"]]
        assert {name: one["questions"] for name, one in method["categories"].items()} == {"a": 2, "b": 2}
        assert {level: one["questions"] for level, one in method["concurrency"].items()} == {"1": 4, "2": 4}
        for batch in method["batches"]:
            count = len(batch["questions"])
            assert len(batch["first_token_s"]) == len(batch["inter_token_s"]) == count
            between = batch["inter_token_s"][0] * (batch["tokens"] - 1) if count == 1 else 0
            assert 0 < max(batch["first_token_s"]) + between <= batch["seconds"]
        own = method["batches"][:4]
        rate = sum(batch["tokens"] for batch in own) / sum(batch["seconds"] for batch in own)
        assert method["overall"]["tokens_per_s"] == pytest.approx(rate, rel=1e-3)
    assert trees["speedup"] == pytest.approx(trees["tokens_per_s"] / plain["tokens_per_s"], rel=2e-3)


def test_bench_measures_running_servers(servers, tmp_path, capsys):
    found, seconds = bench(tmp_path, servers["plain"].url, servers["trees"].url)
    check_bench(found)
    times = [batch["seconds"] for method in found.values() for batch in method["batches"]]
    assert len(set(times)) == len(times) and sum(times) < seconds
    speedup = f"{found['trees']['overall']['speedup']:.2f}x"
    shown = capsys.readouterr().out
    assert "trees" in shown and speedup in shown
    assert cli.main(["bench", "--table", str(tmp_path / "out.json")]) == 0
    assert speedup in capsys.readouterr().out
    # Had it asked other servers, the check would fail.
    for plain, trees in (("trees", "plain"), ("plain", "plain"), ("trees", "trees")):
        undrafted = "plain" if trees == "plain" else "no-drafts"
        with pytest.raises(AssertionError):
            check_bench({"plain": found[plain], "no-drafts": found[undrafted], "trees": found[trees]})


def test_stress(servers, monkeypatch):
    """``benchmarks/end_to_end/stress.py`` for 30 seconds: the answers are plain decoding's, and nothing is left."""
    # It compares all tokens that are handed out, of batches in which requests come and go.
    works = {"stop": DROPS_TOKENS_BEHIND_STOPS, "allowed_token_ids": MASKS_ALLOWED_TOKENS_OF_EACH_REQUEST}
    honest = stress.make_case

    def as_the_host_can(rng):
        case = honest(rng)
        for name, handled in works.items():
            if not handled:
                case.body.pop(name, None)
        return case

    monkeypatch.setattr(stress, "make_case", as_the_host_can)
    result = stress.stress(servers["trees"], servers["plain"], 30, CONCURRENCY, seed=1)
    assert result["problems"] == []
    assert result["compared"] == result["finished"] > 40 and result["aborted"] > 5
    assert result["figures"]["vllm:num_preemptions_total"] > 0
    assert result["figures"]["vllm:spec_decode_num_accepted_tokens_total"] > 100


def complete(server: Server, model: str) -> list[int]:
    body = {
        "prompt": [*range(20, 60)],
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return post_json(server, "/v1/completions", model=model, **body)["choices"][0]["token_ids"]


def test_adapters_come_and_go(servers, tmp_path):
    """The last test of the servers: one adapter stays."""
    paths = {name: str(write_adapter(tmp_path / name, seed)) for seed, name in enumerate(("first", "second"), start=1)}
    answers, drafts = [], servers["trees"].draft_counters()[0]
    for server in servers.values():
        seen = [complete(server, "demo")]
        for name, path in paths.items():
            post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path).close()
            seen += [complete(server, name), complete(server, "demo")]
        post(server, "/v1/unload_lora_adapter", lora_name="first").close()
        answers.append([*seen, complete(server, "second")])
    trees, plain = answers
    assert plain[0] == plain[2] and plain[0] != plain[1] != plain[3]
    assert trees == plain
    assert servers["trees"].draft_counters()[0] > drafts
