"""`specplug data`: layouts, duplicates, several turns, resuming, and bad input; a stand-in replaces vLLM."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.doubles.trained import DRAFT, VOCAB, full_disk, write_target
from vllm_specplug.cli import cli
from vllm_specplug.proposers.eagle3.head import layer_ids
from vllm_specplug.proposers.training import answers as answer_files
from vllm_specplug.proposers.training import features, generate
from vllm_specplug.proposers.training.answers import Conversation, read_answers, read_conversations
from vllm_specplug.proposers.training.precision import compute_dtype
from vllm_specplug.vllm.probes import offline

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write_tokenizer(path: Path, template: str | None = TEMPLATE) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "system", "user", "assistant", *(f"w{i}" for i in range(VOCAB - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("target")
    write_target(path, layers=6)
    write_tokenizer(path)
    return str(path)


class Engine:
    """Answers each prompt with three words that depend on it; keeps the prompts."""

    def __init__(self):
        self.prompts = []

    def __call__(self, prompts, seeds):
        self.prompts += prompts
        # The last request ends first.
        for index, ids in reversed(list(enumerate(prompts))):
            yield index, [4 + (sum(ids) + i) % (VOCAB - 4) for i in range(3)]


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(offline, "start_engine", lambda *_: engine)
    return engine


def write_rows(file: Path, *rows) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


# ---- prompts


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "source": "s"}, Conversation("s", ["a"])),
        ({"turns": ["a", "b"], "category": "c"}, Conversation("c", ["a", "b"])),
        (
            {
                "messages": [
                    {"role": "system", "content": "be"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant"},
                ]
            },
            Conversation("p.jsonl.gz", ["a"], "be"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            Conversation("p.jsonl.gz", ["a"]),
        ),
        (
            {"conversations": [{"from": w, "value": v} for w, v in (("human", "a"), ("gpt", "x"), ("human", "b"))]},
            Conversation("p.jsonl.gz", ["a", "b"]),
        ),
        ({"instruction": "a", "input": "b", "output": "x"}, Conversation("p.jsonl.gz", ["a\n\nb"])),
        ({"instruction": "a", "input": ""}, Conversation("p.jsonl.gz", ["a"])),
        ({"question": "a", "answer": "x"}, Conversation("p.jsonl.gz", ["a"])),
    ],
)
def test_layouts(tmp_path, row, expected):
    assert read_conversations([write_rows(tmp_path / "p.jsonl.gz", row)]) == [expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: it must hold one JSON object with a prompt per line"),
        (b"\n\n", "is empty"),
        (b'{"prompt": "a"}\n{"prompt": \n', r"line 2: not JSON \(Expecting value at column"),
        (b'["a"]\n', "line 1: a JSON object is needed, found list"),
        (b'{"text": "a"}\n', "line 1: a row has neither 'prompt' nor 'turns', 'messages'"),
        (b'{"turns": []}\n', "line 1: a row has neither"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}\n', "line 1: a row has neither"),
        (b'{"turns": ["a", 3]}\n', "line 1: every turn must be a text that is not empty"),
        (b'{"turns": ["a", " "]}\n', "every turn must be a text"),
        (b"\xff\xfe\x00", "is damaged, or its content does not match its name"),
    ],
)
def test_malformed_prompts(tmp_path, content, message):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_conversations([tmp_path / "p.jsonl"])


@pytest.mark.parametrize("content", [b"plain text", gzip.compress(b'{"prompt": "a"}\n' * 500, mtime=0)[:-20]])
def test_damaged_gzip(tmp_path, content):
    (tmp_path / "p.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged, or its content does not match its name"):
        read_conversations([tmp_path / "p.jsonl.gz"])


def test_prompts_file_given_as_answers(tmp_path):
    with pytest.raises(ValueError, match="line 1: not an answer .* was a prompts file given"):
        read_answers(write_rows(tmp_path / "a.jsonl", {"prompt": "a"}))


def test_duplicates_differ_in_white_space_at_most():
    rows = [Conversation("1", ["a  b"]), Conversation("2", ["a\nb "]), Conversation("3", ["ab"])]
    rows += [Conversation("4", ["a b"], "system"), Conversation("5", ["a", "b"])]
    assert [row.source for row in answer_files.without_duplicates(rows)] == ["1", "3", "4", "5"]


# ---- answers

CHATS = [Conversation("a", ["w1", "w2", "w3"]), Conversation("b", ["w4"], "w9"), Conversation("c", ["w5", "w6"])]


def answer(target, path, rows=CHATS, longest=1000, batch=2, engine=None) -> list[dict]:
    tokenizer = generate.load_tokenizer(target)
    generate.answer_conversations(rows, tokenizer, engine or Engine(), path, longest, batch, progress=False)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_turn_is_prompted_with_the_answers_before_it(target, tmp_path):
    rows = answer(target, tmp_path / "a.jsonl")
    assert [(row["conversation"], row["source"], row.get("more", False)) for row in rows] == [
        (0, "a", True),
        (0, "a", True),
        (0, "a", False),
        (1, "b", False),
        (2, "c", True),
        (2, "c", False),
    ]
    first, second = rows[0], rows[1]
    assert first["prompt_ids"] == [2, 5, 3]  # user w1 assistant
    assert second["prompt_ids"] == [*first["prompt_ids"], *first["answer_ids"], 2, 6, 3]
    assert rows[3]["prompt_ids"] == [1, 13, 2, 8, 3]  # system w9 user w4 assistant


@pytest.mark.parametrize("lines", range(6))
@pytest.mark.parametrize("rest", ["", '{"source": "a", "prom'])
def test_a_killed_run_resumes_to_the_same_file(target, tmp_path, lines, rest):
    answer(target, tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_text()
    part = tmp_path / "part.jsonl"
    part.write_text("".join(whole.splitlines(keepends=True)[:lines]) + rest)
    answer(target, part)
    assert part.read_text() == whole


def test_lines_without_a_conversation_count_as_one_each(tmp_path):
    old = {"source": "a", "prompt_ids": [1], "answer_ids": [2]}
    assert generate.resume_at(write_rows(tmp_path / "a.jsonl", old, old)) == 2


def test_long_prompts_are_cut_and_long_conversations_end(target, tmp_path):
    rows = answer(target, tmp_path / "a.jsonl", longest=9)
    assert [row["conversation"] for row in rows] == [0, 0, 1, 2, 2]
    assert not any(row.get("more") for row in (rows[1], rows[4]))
    assert all(len(row["prompt_ids"]) <= 9 for row in rows)
    (row,) = answer(target, tmp_path / "b.jsonl", [Conversation("a", ["w1 w2 w3 w4"])], longest=4)
    assert row["prompt_ids"] == [2, 5, 6, 7]


def test_full_disk_keeps_complete_conversations(target, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [Conversation("a", [f"w{i} w{j}"]) for i in range(10) for j in range(10)]
    with full_disk(5000), pytest.raises(OSError, match="could not be written.*it resumes"):
        answer(target, path, rows, batch=10)
    kept = path.read_text()
    assert kept.endswith("\n") and 10 <= len(kept.splitlines()) < 100 and len(kept) < 5000
    assert len(answer(target, path, rows)) == 100 and path.read_text().startswith(kept)


# ---- the command


def data(target, out, prompts, *more) -> int:
    return cli.main(["data", "--target", target, "--prompts", str(prompts), "--out", str(out), *more])


def fails(capsys, *words):
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("specplug: error:") and all(word in error for word in words), error


def test_from_prompts_to_features_and_into_training(target, engine, tmp_path, capsys):
    prompts = write_rows(
        tmp_path / "p.jsonl", {"turns": ["w1 w2", "w3"]}, {"prompt": "w4"}, {"prompt": " w4 "}, {"prompt": "w5 w6"}
    )
    out = tmp_path / "data"
    assert data(target, out, prompts, "--eagle3") == 0
    assert "3 prompts (1 duplicates dropped), 4 answers, 12 answer tokens" in capsys.readouterr().out
    loaded = features.load_features(sorted((out / "features").glob("*.safetensors")), layers=True)
    assert [loaded.ids[s : s + n].tolist() for s, n in zip(loaded.starts, loaded.lengths, strict=True)] == [
        row.ids for row in read_answers(out / "answers.jsonl")
    ]
    answered = len(engine.prompts)
    assert data(target, out, prompts, "--eagle3") == 0 and len(engine.prompts) == answered  # nothing is left to answer
    flags = ["--data", str(out), "--epochs", "1", "--draft-vocab-size", str(DRAFT)]
    for method in ("eagle", "eagle3"):  # the features of three layers serve all
        assert cli.main(["train", method, "--target", target, "--out", str(tmp_path / method), *flags]) == 0
        assert (tmp_path / method / "model.safetensors").exists()
    assert not (tmp_path / "eagle" / "features").exists()
    capsys.readouterr()
    argv = ["train", "eagle", "--target", target, "--out", str(tmp_path / "x"), "--data", str(out)]
    assert cli.main([*argv, "--prompts", str(prompts)]) == 2
    fails(capsys, "give either --data or --prompts")


def test_a_drafter_to_start_from(target, engine, tmp_path, capsys):
    prompts = write_rows(tmp_path / "p.jsonl", {"prompt": "w1 w2"})
    out = tmp_path / "out"
    argv = ["train", "hass", "--target", target, "--prompts", str(prompts), "--out", str(out), "--init-from"]
    with pytest.raises(SystemExit, match="2"):
        cli.main([*argv, "nowhere"])
    error = capsys.readouterr().err
    assert "argument --init-from: drafter 'nowhere' does not exist" in error and "smollm2-135m-instruct" in error
    assert not out.exists()  # the target has answered nothing
    assert cli.main([*argv, "smollm2-135m-instruct"]) == 2  # of another target
    fails(capsys, "hidden size 576")
    assert not out.exists()


def test_layer_features_are_the_inputs_of_the_layers(target, tmp_path):
    from transformers import AutoModel

    ids = [5, 9, 11, 4]
    (file,) = features.extract(
        target, [answer_files.Answer("a", ids[:2], ids[2:])], tmp_path, layers=(0, 3, 6), progress=False
    )
    loaded = features.load_features([file], layers=True)
    model = AutoModel.from_pretrained(target, dtype=compute_dtype("cpu"))
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        low, middle, high = loaded.layer_features.split(16, dim=1)
        assert torch.equal(low, states[0][0].bfloat16()) and torch.equal(middle, states[3][0].bfloat16())
        # The last one is taken before the final norm, as vLLM returns it.
        torch.testing.assert_close(model.bfloat16().norm(high), states[6][0].bfloat16())
    assert layer_ids({"num_hidden_layers": 30}) == (2, 15, 27)


def test_settings_that_changed_are_refused(target, engine, tmp_path, capsys):
    prompts = write_rows(tmp_path / "p.jsonl", {"prompt": "w4"})
    assert data(target, tmp_path / "d", prompts, "--no-features") == 0
    write_rows(prompts, {"prompt": "w5"})
    assert data(target, tmp_path / "d", prompts, "--max-tokens", "9") == 2
    fails(capsys, "has data with other max_tokens, prompts_sha256", "another --out")


def test_target_without_a_chat_template(engine, tmp_path, capsys):
    write_target(tmp_path / "t")
    write_tokenizer(tmp_path / "t", template=None)
    prompts = write_rows(tmp_path / "p.jsonl", {"prompt": "w4"})
    assert data(str(tmp_path / "t"), tmp_path / "d", prompts) == 2
    fails(capsys, "has no chat template", "--chat-template")
    assert not (tmp_path / "d").exists() and not engine.prompts
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    template = ["--chat-template", str(tmp_path / "chat.jinja")]
    assert data(str(tmp_path / "t"), tmp_path / "d", prompts, "--no-features", *template) == 0
    assert engine.prompts == [[2, 8, 3]]


#: A template as that of Qwen3: without the switch the answer thinks first.
SWITCHED = TEMPLATE.replace(
    "assistant {% endif",
    "assistant {% if enable_thinking is sameas false %}w0 w1 {% endif %}{% endif",
)
SWITCHES = '{"enable_thinking": false}'


def served_ids(target: str, text: str, switches: dict) -> list[int]:
    """The prompt that vLLM's server makes of a chat."""
    from transformers import AutoTokenizer
    from vllm.renderers.hf import safe_apply_chat_template

    chat = [{"role": "user", "content": text}]
    tokenizer = AutoTokenizer.from_pretrained(target)
    config = SimpleNamespace(
        model=target,
        tokenizer=target,
        tokenizer_revision=None,
        revision=None,
        code_revision=None,
        trust_remote_code=False,
    )
    return safe_apply_chat_template(config, tokenizer, chat, add_generation_prompt=True, **switches)


def test_prompts_are_the_ids_that_a_server_with_the_same_switches_of_the_template_reads(engine, tmp_path, capsys):
    write_target(tmp_path / "t")
    write_tokenizer(tmp_path / "t", SWITCHED)
    target, prompts = str(tmp_path / "t"), write_rows(tmp_path / "p.jsonl", {"prompt": "w4"})
    switches = ["--chat-template-kwargs", SWITCHES]
    assert data(target, tmp_path / "d", prompts, "--no-features", *switches) == 0
    assert data(target, tmp_path / "plain", prompts, "--no-features") == 0
    served = [served_ids(target, "w4", given) for given in (json.loads(SWITCHES), {})]
    assert engine.prompts == served == [[2, 8, 3, 4, 5], [2, 8, 3]]
    assert data(target, tmp_path / "d", prompts, "--no-features") == 2
    fails(capsys, "has data with other chat_template_kwargs")
    engine.prompts.clear()
    out = str(tmp_path / "head")
    command = ["train", "eagle", "--target", target, "--prompts", str(prompts), "--out", out, "--epochs", "1"]
    assert cli.main([*command, "--draft-vocab-size", str(DRAFT), *switches]) == 0
    assert engine.prompts == served[:1]
    assert cli.main([*command, "--draft-vocab-size", str(DRAFT)]) == 2
    fails(capsys, "has data with other chat_template_kwargs")


@pytest.mark.parametrize("given", ["{", "[]", '{"tokenize": false}'])
def test_switches_that_are_none(target, tmp_path, capsys, given):
    with pytest.raises(SystemExit):
        data(target, tmp_path / "d", tmp_path / "p.jsonl", "--chat-template-kwargs", given)
    assert "--chat-template-kwargs" in capsys.readouterr().err


def test_damaged_json_is_named(target, engine, tmp_path, capsys):
    prompts = write_rows(tmp_path / "p.jsonl", {"prompt": "w4"})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data.json").write_text("{")
    assert data(target, tmp_path / "d", prompts, "--no-features") == 2
    fails(capsys, f"{tmp_path}/d/data.json is not valid JSON", "another --out")
    (tmp_path / "config.json").write_text("{")
    assert data(str(tmp_path), tmp_path / "d", prompts) == 2
    fails(capsys, f"{tmp_path}/config.json is not valid JSON", "download the model again")


def test_bad_files_write_nothing(target, engine, tmp_path, capsys):
    prompts = write_rows(tmp_path / "p.jsonl")
    assert data(target, tmp_path / "d", prompts) == 2
    fails(capsys, "p.jsonl is empty")
    assert data(target, tmp_path / "d", tmp_path / "none.jsonl") == 2
    fails(capsys, "none.jsonl")
    assert data(str(tmp_path), tmp_path / "d", prompts) == 2
    fails(capsys, "is not a Hugging Face folder")
    assert not (tmp_path / "d").exists() and not engine.prompts
