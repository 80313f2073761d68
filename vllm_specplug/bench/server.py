"""A running OpenAI-compatible server to measure."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm_specplug.bench.methods import Method
from vllm_specplug.bench.questions import Question
from vllm_specplug.bench.workers import Measurement

_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)_total\{(.*?)\} (\S+)", re.M
)


class Server:
    """Client of a server that was started by someone else."""

    def __init__(self, label: str, url: str, switches: dict[str, Any] | None = None) -> None:
        self.switches = switches  # of the chat template
        self.method, self.url = Method(label, {"server": url}), url.rstrip("/").removesuffix("/v1")
        self.model = json.loads(self._get("/v1/models"))["data"][0]["id"]

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as reply:
                return reply.read().decode()
        except (urllib.error.URLError, TimeoutError) as error:
            raise OSError(f"{self.url}{path} does not answer: {error}; is the server running?") from None

    def counters(self) -> tuple[int, list[int]]:
        """Return the number of drafts so far, and of those with at least 1, 2, ... accepted tokens."""
        drafts = 0
        by_depth: dict[int, int] = {}
        for name, labels, value in _COUNTER.findall(self._get("/metrics")):
            if name == "drafts":
                drafts += int(float(value))
            elif name == "accepted_tokens_per_pos" and (position := re.search(r'position="(\d+)"', labels)):
                by_depth[int(position[1])] = by_depth.get(int(position[1]), 0) + int(float(value))
        return drafts, [by_depth[position] for position in sorted(by_depth)]

    def generate(
        self, questions: list[Question], max_tokens: int, temperature: float = 0.0, *, at_once: int | None = None
    ) -> Measurement:
        """Let the server answer a batch, ``at_once`` questions at a time (default: all)."""
        drafts, by_depth = self.counters()
        start = time.perf_counter()
        with ThreadPoolExecutor(at_once or len(questions)) as pool:
            answers = list(pool.map(lambda question: self._ask(question, max_tokens, temperature), questions))
        seconds = time.perf_counter() - start
        new_drafts, new_by_depth = self.counters()
        accepted = [new - old for new, old in zip(new_by_depth, by_depth or [0] * len(new_by_depth), strict=True)]
        token_ids, first, inter = zip(*answers, strict=True)
        names = [question.name for question in questions]
        return Measurement(
            names,
            questions[0].category,
            seconds,
            list(token_ids),
            new_drafts - drafts,
            sum(accepted),
            accepted,
            list(first),
            [gap for gap in inter if gap is not None],
        )

    def _ask(self, question: Question, max_tokens: int, temperature: float) -> tuple[list[int], float, float | None]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "return_token_ids": True,
        }
        if temperature:
            body["seed"] = 0
        if not self.method.drafts:
            body["vllm_xargs"] = {"speculation": False}
        if self.switches:
            body["chat_template_kwargs"] = self.switches
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
        token_ids: list[int] = []
        start = time.perf_counter()
        first = last = start
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                for line in reply:
                    if not line.startswith(b"data: {"):
                        continue
                    for choice in json.loads(line[6:])["choices"]:
                        if ids := choice.get("token_ids"):
                            last = time.perf_counter()
                            first = last if not token_ids else first
                            token_ids += ids
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.url} refused question {question.name}: {error.read().decode()[:300]}") from None
        if not token_ids:
            raise RuntimeError(f"{self.url} sent no token ids for question {question.name}: only vLLM servers do")
        gap = (last - first) / (len(token_ids) - 1) if len(token_ids) > 1 else None
        return token_ids, first - start, gap

    def close(self) -> None:
        """Do nothing: the server keeps running, and its memory cannot be read from here."""

    def kill(self) -> None:
        """Do nothing: the server keeps running."""
