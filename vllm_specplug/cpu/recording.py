"""Record answers and hidden states of served requests for training (option ``record``), on the V1 runner on a CPU.

A step only gathers the accepted rows of the requests that are recorded.  When a request ends, its rows go to the thread
of ``recorded.ShardWriter``.  Not recorded: requests with ``{"record": false}``, with images, embeddings or LoRA.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_specplug.config import ConfigError, TreeOptions, model_drafter
from vllm_specplug.core.request_args import wants_record
from vllm_specplug.proposers.training.recorded import Facts, RecordedAnswer, ShardWriter

if TYPE_CHECKING:
    from vllm_specplug.cpu.draft import AcceptedRows

logger = logging.getLogger("vllm_specplug")

#: Tokens of the longest sequence; the rest of a request is left out, as `specplug data` does.
MAX_LENGTH = 2048
#: Bytes of hidden states of unfinished requests; a request that does not fit is not recorded.
HELD_BYTES = 256 << 20


@dataclass
class _Kept:
    """Hidden states of one request's tokens ``[start, stop)``."""

    start: int
    stop: int
    parts: list[torch.Tensor] = field(default_factory=list)

    def cut(self, position: int) -> int:
        """Keep the rows before ``position``, from which on the request is computed; return how many are forgotten.

        It is computed again after a preemption, and in a session after a turn that ended inside an accepted path.  None
        are kept if the rows next to ``position`` are missing: another request has computed them.
        """
        held = self.stop - self.start
        if not self.start <= position <= self.stop:
            self.start, self.stop, self.parts = position, position, []
            return held
        forgotten = self.stop - position
        if forgotten:
            self.parts = [torch.cat(self.parts)[: position - self.start]]
            self.stop = position
        return forgotten


class Recorder:
    """Records the answers of a V1 runner.

    Args:
        runner: has ``input_batch``, ``requests`` and the step's ``accepted`` rows.
        writer: takes the answers.
        row_bytes: of one token's hidden states.
    """

    def __init__(self, runner: Any, writer: ShardWriter, row_bytes: int):
        self._runner, self._writer = runner, writer
        self._room = HELD_BYTES // row_bytes
        #: None: the request is not recorded.
        self._kept: dict[str, _Kept | None] = {}

    def read(self, hidden_states: torch.Tensor, rows: AcceptedRows) -> None:
        """Keep the rows of a step.

        Args:
            hidden_states: ``[num_flat_rows, hidden_size]``; the target's.
            rows: the accepted rows of all requests.
        """
        if self._writer.failed:
            self._kept.clear()
            return
        batch = self._runner.input_batch
        req_ids, counts = batch.req_ids, rows.counts.tolist()
        starts = batch.num_computed_tokens_cpu[: len(counts)].tolist()
        chosen = np.zeros(len(counts), dtype=bool)
        for place, (req_id, start, count) in enumerate(zip(req_ids, starts, counts, strict=True)):
            chosen[place] = count > 0 and self._takes(req_id, start, count)
        if not chosen.any():
            return
        gathered = hidden_states[rows.of(chosen)]
        first = 0
        for place in np.flatnonzero(chosen).tolist():
            self._keep(self._kept[req_ids[place]], gathered, first, starts[place], counts[place])
            first += counts[place]

    def _takes(self, req_id: str, start: int, count: int) -> bool:
        """Decide whether rows of a request are kept."""
        kept = self._kept.setdefault(req_id, _Kept(start, start))
        if kept is None or start >= MAX_LENGTH:
            return False
        self._room += kept.cut(start)
        if count > self._room or not self._records(req_id):  # each turn of a session may turn it off
            self._room += kept.stop - kept.start
            self._kept[req_id] = None
            return False
        self._room -= count
        return True

    @staticmethod
    def _keep(kept: _Kept, gathered: torch.Tensor, first: int, start: int, count: int) -> None:
        kept.parts.append(gathered[first : first + count])
        kept.stop = start + count

    def _records(self, req_id: str) -> bool:
        request = self._runner.requests[req_id]
        params = request.sampling_params
        if params is None or request.mm_features or request.lora_request is not None or not request.prompt_token_ids:
            return False
        return wants_record(params.extra_args)

    def finish(self, request_ids: Collection[str]) -> None:
        """Take notice of requests that have ended; called while the runner still has their tokens."""
        for req_id in request_ids:
            kept = self._kept.pop(req_id, None)
            if kept is None:
                continue
            self._room += kept.stop - kept.start
            if (answer := _answer(self._runner.requests.get(req_id), kept)) is not None:
                self._writer.add(answer)

    def close(self) -> None:
        """Write what is complete."""
        self._writer.close()


def make_recorder(runner: Any, options: TreeOptions) -> Recorder | None:
    """Make what the options ask for; None: nothing is recorded.

    Raises:
        ConfigError: the folder cannot be used.
    """
    drafter = model_drafter(options)
    folder = getattr(drafter, "record", None)
    if folder is None:
        return None
    config = runner.model_config
    facts = Facts(Path(config.model).name, config.get_hidden_size(), config.get_vocab_size())
    try:
        writer = ShardWriter(folder, drafter.record_mib << 20, facts)
    except (ValueError, OSError) as error:
        raise ConfigError(f"record={folder!r}: {error}") from error
    logger.info("Answers and their hidden states are recorded to %s, at most %d MiB", folder, drafter.record_mib)
    return Recorder(runner, writer, facts.hidden_size * config.dtype.itemsize)


def _answer(request: Any, kept: _Kept) -> RecordedAnswer | None:
    """Return what is known of a request that has ended; None if that is no more than its prompt."""
    if request is None:
        return None
    num_prompt = len(request.prompt_token_ids)
    answer = _without_rest(request.output_token_ids, request.sampling_params)
    # The last token has no hidden state unless it was drafted: the target ends without reading it.
    end = min(num_prompt + len(answer), kept.stop + 1, MAX_LENGTH)
    if end <= num_prompt or end - kept.start < 3:
        return None
    ids = [*request.prompt_token_ids, *answer][kept.start : end]
    return RecordedAnswer(ids, max(num_prompt - kept.start, 1), kept.parts, kept.start)


def _without_rest(token_ids: list[int], params: Any) -> list[int]:
    """Cut an answer as vLLM's scheduler does: a step may emit tokens behind the last one that is kept."""
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos and params.eos_token_id is not None:
        stops.add(params.eos_token_id)
    kept = token_ids[: params.max_tokens]
    end = next((n for n, token in enumerate(kept, start=1) if token in stops and n > params.min_tokens), len(kept))
    return kept[:end]
