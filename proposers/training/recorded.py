"""Answers that a server records for training (option `record`): a ring of shards that several servers can share.

FOLDER/recorded.json                  the target, see `Facts`
FOLDER/features/shard-*.safetensors   shards as in features.py, in the order of their names
FOLDER/.lock                          held by a process while it adds a shard

The sequences of a shard differ from those of `specplug data` in two ways. The first rows may be missing: those that the
target did not compute, because the prefix cache had them; `first_positions` (int32 [rows]) counts them. And the feature
of the last token may be zero, because the target ends without reading it; no trainer reads it either.

A thread writes: a whole shard to a temporary file, synced, then renamed. Under the lock it first deletes the oldest
shards, so that all of them stay below the limit. Folders are made with mode 0700, files with 0600.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from .answers import Answer
from .data import FEATURES_NAME
from .features import FeatureSet, join, load_features

logger = logging.getLogger("vllm_specplug")

FACTS_NAME, LOCK_NAME = "recorded.json", ".lock"
#: A shard is written at the first of these limits.
SHARD_ANSWERS, SHARD_BYTES, SHARD_SECONDS = 128, 8 << 20, 60.0
#: Hidden states that wait for the thread; further answers are dropped.
WAITING_BYTES = 64 << 20


@dataclass(frozen=True)
class Facts:
    """Properties that all shards of a folder share.

    Attributes:
        target: name of the target's folder or repository.
        hidden_size, vocab_size: the target's.
    """

    target: str
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class RecordedAnswer:
    """The tail of one request: all tokens from the first one whose hidden state is known.

    Attributes:
        ids: token ids [tokens].
        prompt_length: how many of them belong to the prompt, at least 1.
        features: parts, [rows, hidden] each, of the tokens in order; the last token's row may be missing, rows
            after it are not written.
        first_position: tokens of the request before these.
    """

    ids: list[int]
    prompt_length: int
    features: list[torch.Tensor]
    first_position: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the hidden states in memory."""
        return sum(part.nbytes for part in self.features)


class ShardWriter:
    """Adds answers to a folder, in a thread; after a failure it logs one warning and drops the answers.

    Args:
        folder: made if it is missing; its parent must exist.
        limit: bytes of all shards in the folder.

    Raises:
        ValueError: the folder has answers of another target.
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike, limit: int, facts: Facts):
        self.folder, self.limit, self.facts = Path(folder), limit, facts
        self.features = self.folder / FEATURES_NAME
        for made in (self.folder, self.features):
            made.mkdir(mode=0o700, exist_ok=True)
        with _locked(self.folder):
            _record_facts(self.folder, facts)
        self.failed = False
        self._count = 0
        self._waiting, self._waiting_lock = 0, threading.Lock()
        self._queue: queue.SimpleQueue[RecordedAnswer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specplug-record", daemon=True)
        self._thread.start()

    def add(self, answer: RecordedAnswer) -> bool:
        """Hand an answer to the thread; return whether it is taken."""
        if self.failed or self._waiting > WAITING_BYTES:
            return False
        self._add_waiting(answer.num_bytes)
        self._queue.put(answer)
        return True

    def _add_waiting(self, size: int) -> None:
        with self._waiting_lock:
            self._waiting += size

    def close(self) -> None:
        """Write the open shard and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._write_shards()
        except Exception as error:  # whatever it is, the server goes on
            self.failed = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("Recording to %s has stopped, and serving goes on: %s", self.folder, reason)
            while not self._queue.empty():
                self._queue.get()

    def _write_shards(self) -> None:
        """Collect answers into shards until the queue gives None."""
        answers: list[RecordedAnswer] = []
        size, opened = 0, 0.0
        closing = False
        while not closing:
            wait = max(opened + SHARD_SECONDS - time.monotonic(), 0.0) if answers else None
            try:
                answer = self._queue.get(timeout=wait)
                closing = answer is None
                is_due = closing
            except queue.Empty:
                answer, is_due = None, True
            if answer is not None:
                opened = opened if answers else time.monotonic()
                answers.append(answer)
                size += _size(answer)
                is_due = len(answers) >= SHARD_ANSWERS or size >= SHARD_BYTES
            if is_due and answers:
                self._write(answers)
                self._add_waiting(-sum(one.num_bytes for one in answers))
                answers, size = [], 0

    def _write(self, answers: list[RecordedAnswer]) -> None:
        content = save(_tensors(answers), metadata={"target": self.facts.target})
        self._count += 1
        name = f"shard-{time.time_ns():020d}-{os.getpid()}-{self._count}.safetensors"
        with _locked(self.folder):
            for leftover in self.features.glob(".shard-*"):  # nobody else writes under the lock
                leftover.unlink(missing_ok=True)
            if not self._make_room(len(content)):
                return
            temporary = self.features / f".{name}"
            try:
                _write_private(temporary, content)
                os.rename(temporary, self.features / name)
            finally:
                temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        """Delete the oldest shards until one of `size` bytes fits; return whether it does."""
        sizes = {file: file.stat().st_size for file in shard_files(self.folder)}
        total = sum(sizes.values()) + size
        for file, freed in sizes.items():
            if total <= self.limit:
                break
            file.unlink(missing_ok=True)
            total -= freed
        return total <= self.limit


def is_recorded(folder: str | os.PathLike) -> bool:
    """Return whether a server has recorded to the folder."""
    return (Path(folder) / FACTS_NAME).is_file()


def shard_files(folder: str | os.PathLike) -> list[Path]:
    """List the shards of a folder, the oldest first."""
    return sorted((Path(folder) / FEATURES_NAME).glob("shard-*.safetensors"))


def read_shard(file: Path, vocab_size: int) -> FeatureSet | None:
    """Read a shard; None if the ring has deleted it, or if it is damaged, which is logged."""
    try:
        data = load_features([file])
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if file.exists():
            logger.warning("%s is left out: it cannot be read (%s)", file, str(error).splitlines()[0])
        return None
    if problem := _problem(data, vocab_size):
        logger.warning("%s is left out: %s", file, problem)
        return None
    return data


def shard_answer_tokens(file: Path) -> int:
    """Count the answer tokens of a shard; 0 if it is gone or damaged."""
    try:
        with safe_open(str(file), framework="pt") as shard:
            return int((shard.get_tensor("lengths") - shard.get_tensor("prompt_lengths")).sum())
    except (SafetensorError, OSError, RuntimeError):
        return 0


def read_recorded(folder: str | os.PathLike, vocab_size: int) -> FeatureSet:
    """Read all shards of a folder that are there and whole.

    Raises:
        ValueError: there are none.
    """
    sets = [data for file in shard_files(folder) if (data := read_shard(file, vocab_size)) is not None]
    if not sets:
        raise ValueError(f"{folder} has no recorded answers: serve some requests first")
    return join(sets)


def read_facts(folder: str | os.PathLike) -> Facts:
    """Read the facts that the shards of a recorded folder share.

    Raises:
        ValueError: nothing was recorded there, or the file is damaged.
    """
    file = Path(folder) / FACTS_NAME
    try:
        return Facts(**json.loads(file.read_text()))
    except FileNotFoundError:
        raise ValueError(f'{folder} has no recorded answers: start a server with "record": "{folder}"') from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete the folder, or record to another one") from error


def answers_of(data: FeatureSet) -> list[Answer]:
    """The token ids of all sequences, as `read_answers` returns them."""
    ends = (data.starts + data.lengths).tolist()
    rows = zip(data.starts.tolist(), data.prompt_lengths.tolist(), ends, strict=True)
    return [
        Answer("recorded", data.ids[start : start + prompt].tolist(), data.ids[start + prompt : end].tolist())
        for start, prompt, end in rows
    ]


def _problem(data: FeatureSet, vocab_size: int) -> str | None:
    """Why a shard cannot be used, or None."""
    if len({data.ids.numel(), data.features.shape[0], int(data.lengths.sum())}) > 1 or int(data.lengths.min()) < 1:
        return "its lengths do not belong to its rows"
    if not bool(((data.prompt_lengths >= 1) & (data.prompt_lengths <= data.lengths)).all()):
        return "its prompts are longer than its sequences"
    if not 0 <= int(data.ids.min()) <= int(data.ids.max()) < vocab_size:
        return "it has token ids that the target does not have"
    return None if bool(data.features.isfinite().all()) else "it has features that are not finite"


def _tensors(answers: list[RecordedAnswer]) -> dict[str, torch.Tensor]:
    lengths = [len(answer.ids) for answer in answers]
    return {
        "features": torch.cat([_rows(answer.features, len(answer.ids)) for answer in answers]),
        "ids": torch.tensor([i for answer in answers for i in answer.ids], dtype=torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "prompt_lengths": torch.tensor([answer.prompt_length for answer in answers], dtype=torch.int32),
        "first_positions": torch.tensor([answer.first_position for answer in answers], dtype=torch.int32),
    }


def _rows(parts: list[torch.Tensor], count: int) -> torch.Tensor:
    """Join parts to bf16 [count, width]; missing rows at the end are zero."""
    rows = torch.cat([part.to("cpu", torch.bfloat16) for part in parts])[:count]
    return torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])]).contiguous()


def _size(answer: RecordedAnswer) -> int:
    return 2 * answer.features[0].shape[1] * len(answer.ids)


def _record_facts(folder: Path, facts: Facts) -> None:
    file = folder / FACTS_NAME
    if file.exists():
        if (found := read_facts(folder)) != facts:
            raise ValueError(
                f"{folder} has answers of another target ({found}), not of {facts}: record to another folder"
            )
        return
    temporary = folder / f".{FACTS_NAME}"
    _write_private(temporary, (json.dumps(asdict(facts), indent=2) + "\n").encode())
    os.rename(temporary, file)


def _write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, and wait until it is on the disk."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process."""
    with open(os.open(folder / LOCK_NAME, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
