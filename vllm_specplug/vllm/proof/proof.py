"""The proof at start on a model runner: read, decode through trees, decode without the mask, decode plainly.

All steps see the same text.  The tokens that a step emits are given, so that rounding cannot lead two runs apart.
The plain steps come last and over the same slots of the KV cache: slots that a commit has left out are still empty.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_specplug.core.proof import Evidence, ProofTree, Row, grow_proof_tree
from vllm_specplug.vllm.proof.driver import Driver, Part
from vllm_specplug.vllm.proof.pages import Pages, Places, choose_places

#: Most depths of the three trees: the proof's first and second, and the control's.
DEPTHS = (4, 2, 4)
#: Token at a position of other text.
_BRANCH = -1
#: The request that reads the text and verifies the trees.
_TEXT = "specplug-text"
_NAMES = ("the first tree", "the second tree", "the control")


class CannotProve(Exception):
    """The engine is too small for the proof; the message says why."""


class Proof:
    """One run of the proof.

    Args:
        driver: of the worker's runner.
        seed: of the text.

    Attributes:
        has_read: whether the first steps, which have no trees, have run.

    Raises:
        CannotProve: a request or the KV cache is too short.
    """

    has_read = False

    def __init__(self, driver: Driver, seed: int = 0):
        self._driver, runner = driver, driver.runner
        vocab_size = runner.model_config.get_vocab_size()
        rng = random.Random(seed)
        first, last = min(vocab_size // 16, 1000), vocab_size // 2
        # Even tokens are the text, odd ones the wrong siblings.
        self._wrong = (rng.randrange(first, last) | 1 for _ in itertools.count())
        depth = min(DEPTHS[0], driver.max_depth, max(1, driver.num_nodes // 2))
        self._branch_depth = max(1, depth - 1)
        room = sum(DEPTHS) + len(DEPTHS) + driver.num_nodes + 1
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        self._has_states = any(isinstance(spec, MambaSpec) for spec in specs)
        # Without prefix caching, a state is in one block for all tokens of a request.
        aligned = getattr(runner.vllm_config.cache_config, "mamba_cache_mode", "none") == "align"
        page = math.lcm(*(spec.block_size for spec in specs if aligned or not isinstance(spec, MambaSpec)))
        arguments = (self._windows(), self._branch_depth, room, runner.max_model_len, self._has_states)
        places = choose_places(math.lcm(page, *self._chunks()), *arguments)  # the tree crosses the end of a chunk
        if places is None or not places.boundary:
            places = choose_places(page, *arguments)
        if places is None:
            raise CannotProve(f"max_model_len={runner.max_model_len} is too short")
        self._places: Places = places
        self._text = [rng.randrange(first, last) & ~1 for _ in range(places.root + room)]
        try:
            pages = Pages(runner.kv_cache_config, places)
            self._own = pages.table(len(self._text))
            self._branch, self._beside = pages.table(places.boundary + 2), pages.own(2)
            self._second = pages.own(len(self._text)) if self._has_states else ()
        except ValueError as error:
            raise CannotProve(str(error)) from None
        #: Rows of trees: name, position and logits.  The row of other text has the position ``_BRANCH``.
        self._trees: list[tuple[str, int, torch.Tensor]] = []
        self._control: list[tuple[str, int, torch.Tensor]] = []
        #: The tokens of the other text after the boundary; empty: there is none.
        self._other_text: list[int] = []

    def _windows(self) -> list[int]:
        layers = get_layers_from_vllm_config(self._driver.runner.vllm_config, AttentionLayerBase).values()
        return sorted({layer.sliding_window for layer in layers if getattr(layer, "sliding_window", None)})

    def _chunks(self) -> set[int]:
        """Return the sizes of chunks of local attention."""
        layers = get_layers_from_vllm_config(self._driver.runner.vllm_config, AttentionLayerBase).values()
        return {layer.attention_chunk_size for layer in layers if getattr(layer, "attention_chunk_size", None)}

    @torch.inference_mode()
    def run(self) -> Evidence | None:
        """Run it.

        Returns:
            What was computed; None on a rank that has no logits.

        Raises:
            ProofFailed: a step emitted other tokens than it was given.
        """
        with self._driver.quiet():
            read = self._read()
            self.has_read = True
            self._verify()
            plain, again = self._decode_on() if self._has_states else self._decode_plainly()
        if not plain:
            return None
        again = [*read, *again]
        config = self._driver.runner.model_config
        rows = [
            [Row(name, logits, plain[position]) for name, position, logits in found]
            for found in (again, self._trees, self._control)
        ]
        on_cpu = self._driver.runner.device.type == "cpu"
        layers = config.hf_text_config.num_hidden_layers
        return Evidence(config.dtype, layers, self._driver.keeps_bits, *rows, needs_power=on_cpu)

    # ---- the prompt

    def _read(self) -> list[tuple[str, int, torch.Tensor]]:
        """Read the context; return its last row."""
        most, root = self._driver.runner.max_num_tokens, self._places.root
        pieces = [
            (first, min(first + most, stop)) for start, stop in self._places.reads for first in range(start, stop, most)
        ]
        parts = [
            Part(f"specplug-read-{first}", self._text[:stop], first, self._own, [0]) for first, stop in pieces[:-1]
        ]
        self._tree = self._grow(0, root)
        last = Part(_TEXT, self._text[:root], pieces[-1][0], self._own, [self._text[root]], upcoming=self._tree)
        found = self._one_by_one([*parts, last]) if self._has_states else self._in_batches([*parts, last])
        return [("the prompt's last row", root - 1, found[_TEXT][0])] if found else []

    def _in_batches(self, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
        """Run parts in order, as many at once as the runner may have; their requests end, but for the proof's text.

        A part may read what one before it writes: each layer writes all keys before a row attends to them.
        """
        runner, batches = self._driver.runner, [[]]
        for part in parts:
            rows = sum(other.count for other in batches[-1]) + part.count
            if len(batches[-1]) == runner.max_num_reqs or rows > runner.max_num_tokens:
                batches.append([])
            batches[-1].append(part)
        found: dict[str, torch.Tensor] = {}
        for batch in batches:
            found |= self._driver.run(batch)
            self._driver.finish([part for part in batch if part.request_id != _TEXT])
        return found

    def _one_by_one(self, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
        """Run parts that continue each other's states."""
        found: dict[str, torch.Tensor] = {}
        for part in parts:
            found |= self._in_batches([part])
        return found

    # ---- trees

    def _grow(self, index: int, root: int) -> ProofTree:
        driver = self._driver
        depth = min(DEPTHS[index], driver.max_depth)
        nodes = min(driver.num_nodes, 2 * depth)
        text = self._text[root + 1 :]
        return grow_proof_tree(text, self._wrong, nodes, depth, self._branch_depth, driver.width)

    def _verify(self) -> None:
        """Verify the proof's trees one after the other, and the control after them."""
        driver, root = self._driver, self._places.root
        for index, name in enumerate(_NAMES):
            tree, stop = self._tree, root + len(self._tree.path_rows)
            is_control = index == len(_NAMES) - 1
            self._tree = None if is_control else self._grow(index + 1, stop)
            emitted = self._text[root + 1 : stop + 1]
            text = Part(_TEXT, self._text[: root + 1], root, self._own, emitted, tree, self._tree, self._places.root)
            beside = []
            if index == 1 and driver.runner.max_num_reqs > 1:  # beside rows of a prompt
                beside = [Part("specplug-beside", self._text[:2], 0, self._beside, [0])]
            with driver.mask_off() if is_control else nullcontext():
                logits = driver.run([text, *beside]).get(_TEXT)
            driver.finish(beside + [text] * is_control)
            if index == 0 and tree.branch_rows and self._places.boundary and not self._has_states:
                self._other_text = [tree.token_ids[row - 1] for row in tree.branch_rows]
            if logits is not None:
                self._keep(name, is_control, root, tree, logits)
            self._last, root = stop - 1, stop

    def _keep(self, name: str, is_control: bool, root: int, tree: ProofTree, logits: torch.Tensor) -> None:
        for depth, row in enumerate(tree.path_rows):
            position = root + depth
            behind = ", after the end of the page" if 0 < self._places.boundary <= position else ""
            where = f"the row at depth {depth} of {name}{behind}"
            # The control's root sees the context alone: it shows the rows that the tree before it has committed.
            if not (is_control and depth):
                self._trees.append((where, position, logits[row]))
            elif self._driver.num_nodes > 1:
                self._control.append((where, position, logits[row]))
        if root == self._places.root and self._other_text:
            row = logits[tree.branch_rows[1]]
            self._trees.append((f"the row below a wrong token of {name}", _BRANCH, row))

    # ---- plainly

    def _decode_plainly(self) -> tuple[dict[int, torch.Tensor], list[tuple[str, int, torch.Tensor]]]:
        """Return plain logits by position, and those of the last one again, as the only row of a step.

        Each position is the last row of a request, on the same pages.
        """
        parts = {position: self._plain("one", position) for position in range(self._places.root - 1, self._last + 1)}
        if self._other_text:
            boundary = self._places.boundary
            text = [*self._text[:boundary], *self._other_text]
            parts[_BRANCH] = Part("specplug-branch", text, boundary, self._branch, [0])
        found = self._in_batches(list(parts.values()))
        alone = self._plain("alone", self._last)
        logits = self._in_batches([alone]).get(alone.request_id)
        plain = {position: found[part.request_id][0] for position, part in parts.items()} if found else {}
        return plain, [] if logits is None else [("a row alone", self._last, logits[0])]

    def _decode_on(self) -> tuple[dict[int, torch.Tensor], list[tuple[str, int, torch.Tensor]]]:
        """Return plain logits by position, and each of them again, as one of two rows of a step.

        A target with states decodes a position only after the one before it.
        """
        alone = self._chains({"specplug-alone": self._own})
        tables = {"specplug-first": self._own, "specplug-second": self._second}
        names = list(tables)[-self._driver.runner.max_num_reqs :]
        beside = self._chains({name: tables[name] for name in names})
        plain = {position: logits[0] for (_, position), logits in alone.items()}
        return plain, [("a row beside another", position, logits[0]) for (_, position), logits in beside.items()]

    def _chains(self, tables: dict[str, tuple[list[int], ...]]) -> dict[tuple[str, int], torch.Tensor]:
        """Read the context and decode the text after it, for requests side by side; return logits by position."""
        driver, root, found = self._driver, self._places.root, {}
        most = driver.runner.max_num_tokens
        for name, table in tables.items():
            stops = [*range(most, root, most), root]
            parts = [
                Part(name if stop == root else f"{name}-{stop}", self._text[:stop], max(0, first), table, [0])
                for first, stop in zip([0, *stops], stops, strict=False)
            ]
            parts[-1].emitted = [self._text[root]]
            read = self._kept(parts, name)
            found |= {(name, root - 1): read[name]} if read else {}
        for position in range(root, self._last + 1):
            emitted = [self._text[position + 1]]
            parts = [
                Part(name, self._text[: position + 1], position, table, emitted, num_prompt=root)
                for name, table in tables.items()
            ]
            found |= {(name, position): logits for name, logits in driver.run(parts).items()}
        driver.finish([Part(name, [], 0, table, []) for name, table in tables.items()])
        return found

    def _kept(self, parts: Sequence[Part], name: str) -> dict[str, torch.Tensor]:
        """Run parts one by one; their requests end, but for the one of this name."""
        found: dict[str, torch.Tensor] = {}
        for part in parts:
            found |= self._driver.run([part])
            self._driver.finish([part] if part.request_id != name else [])
        return found

    def _plain(self, name: str, position: int) -> Part:
        return Part(f"specplug-{name}-{position}", self._text[: position + 1], position, self._own, [0])
