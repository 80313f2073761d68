"""Draft phases and kernels around them, without vLLM: checked, recorded as a CUDA graph, timed.

The drafter is an EAGLE head with random weights, in the shape of an 8B model on a GPU.  Its growth is
``proposers.eagle2.drafting.grow_tree``, its attention our Triton kernel over pages, as vLLM's V2 runner serves it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.device import attempt, device, launches, no_syncs, record, timed
from tests.doubles import union_reference
from tests.doubles.contexts import make_match_inputs
from tests.doubles.lookup_reference import draft_matches
from tests.doubles.lookup_reference import match_keys as match_keys_reference
from vllm_specplug.config import Eagle2Options
from vllm_specplug.core import draft_sampling
from vllm_specplug.core.growth import TORCH_STATIC
from vllm_specplug.core.tree_rows import CpuTreeRows, DeviceTreeRows, KvPages
from vllm_specplug.cpu.kernels.tree_attention import tree_attention_reference
from vllm_specplug.gpu.kernels import growth as triton_growth
from vllm_specplug.gpu.kernels.lookup import match_keys
from vllm_specplug.gpu.kernels.tree_attention import tree_attention
from vllm_specplug.proposer import DeviceDraftContext
from vllm_specplug.proposers.eagle2.drafting import DraftFeatures, grow_tree
from vllm_specplug.proposers.eagle2.head import EagleHead, HeadConfig, rotary_table
from vllm_specplug.proposers.lookup.device_proposer import LookupOnDevice
from vllm_specplug.proposers.lookup.options import LookupOptions
from vllm_specplug.proposers.union import device_proposer
from vllm_specplug.proposers.union.learning import start_weights
from vllm_specplug.types import Draft

Row = dict[str, Any]
PAGE = 16
#: An 8B Llama's layer, and the vocabulary of a drafter for it.
LAYER_8B = HeadConfig(4096, 14336, 32, 8, 128)
TINY_LAYER = HeadConfig(64, 96, 4, 2, 16)
DRAFT_VOCAB, TINY_VOCAB = 32768, 96


def measure(question: Row) -> Iterator[Row]:
    """Check and time the draft phase ``name``: ``eagle2``, ``lookup`` or their ``union``."""
    on_gpu = device().type == "cuda"
    for nodes, batch in itertools.product(question["nodes"], question["batches"]):
        row: Row = {"nodes": nodes, "batch": batch, "context": max(question["contexts"])}
        phase = DraftPhase(LAYER_8B if on_gpu else TINY_LAYER, nodes, row["context"], batch, device())
        call = functools.partial(phase.draft, question["name"])
        trees = call()
        if isinstance(problem := attempt(functools.partial(_without_syncs, call)), str):
            row["problem"] = f"waits for the device: {problem}"
        elif problem := _wrong_tree(trees, nodes):
            row["problem"] = problem
        else:
            replay, recorded = record(call)
            replay()
            same = [(got == expected).all(dim=1) for got, expected in zip(recorded, trees, strict=True)]
            row["same_in_graph"] = int((same[0] & same[1]).sum())
            if row["same_in_graph"] < 0.9 * batch:  # equal logits may be ordered differently
                row["problem"] = f"a recorded graph drafts {row['same_in_graph']} of {batch} trees alike"
        row["launches"] = launches(call)
        yield {**row, **timed(call)}


def _without_syncs(call: Callable[[], Any]) -> None:
    with no_syncs():
        call()


def _wrong_tree(trees: tuple[torch.Tensor, ...], nodes: int) -> str | None:
    """Return what is wrong with trees; ``trees`` are token ids and parents, int64 ``[num_reqs, nodes + 1]``."""
    token_ids, parents = (values.cpu() for values in trees)
    rows = torch.arange(nodes + 1)
    if token_ids.shape != parents.shape or token_ids.shape[1] != nodes + 1:
        return f"trees of {tuple(token_ids.shape)} and {tuple(parents.shape)} instead of {nodes + 1} rows"
    if bool((parents >= rows).any()) or bool((parents[:, 1:] < -1).any()):
        return "a node lies before its parent"
    return None


def check_growth(question: Row) -> Iterator[Row]:
    """Compare drafts of a small float32 head on the device with those of the CPU, for each method."""
    for name in ("eagle2", "lookup", "union"):
        cpu = DraftPhase(TINY_LAYER, 15, 40, 4, torch.device("cpu"), reference=True)
        found = [DraftPhase(TINY_LAYER, 15, 40, 4, device()).draft(name), cpu.draft(name)]
        here, expected = ([values.cpu() for values in trees] for trees in found)
        same = [(got == wanted).all(dim=1) for got, wanted in zip(here, expected, strict=True)]
        count = int((same[0] & same[1]).sum())
        row: Row = {"name": name, "trees": 4, "same": count}
        # The device's logarithms may break a tie differently.
        yield row if count >= 3 else {**row, "problem": f"{name}: {count} of 4 trees are the CPU's"}


def measure_search(question: Row) -> Iterator[Row]:
    """Check and time the search for matches of lookup."""
    for context, batch in itertools.product(question["contexts"], question["batches"]):
        row: Row = {"context": context, "batch": batch}
        known = make_match_inputs([context] * batch, context + 64, vocab_size=100)
        given = {name: values.to(device()) for name, values in known.items()}
        search = functools.partial(match_keys, **given, min_match=1, max_match=16)
        if not torch.equal(search().cpu(), match_keys_reference(**known, min_match=1, max_match=16)):
            row["problem"] = f"not what the reference finds: context {context}, batch {batch}"
        elif isinstance(problem := attempt(functools.partial(_without_syncs, search)), str):
            row["problem"] = f"waits for the device: {problem}"
        yield {**row, **timed(search)}


class DraftPhase:
    """Draft phases of a batch: an EAGLE head's trees, lookup's, and their union.

    Args:
        config: of the head; its weights are random, float32 for ``TINY_LAYER``, else bfloat16.
        nodes: of a tree.
        context: tokens of each request.
        batch: requests.
        place: device of everything.
        reference: use the torch references instead of the Triton kernels.
    """

    def __init__(
        self, config: HeadConfig, nodes: int, context: int, batch: int, place: torch.device, reference: bool = False
    ):
        self.reference = reference
        self.config, self.nodes, self.context, self.batch, self.place = config, nodes, context, batch, place
        tiny = config is TINY_LAYER
        self.dtype, vocab = (torch.float32, TINY_VOCAB) if tiny else (torch.bfloat16, DRAFT_VOCAB)
        depth, top_k = (6, 10) if nodes > 20 else (3, 3) if tiny else (5, 6)
        self.options = Eagle2Options(model="random", num_speculative_tokens=nodes, draft_depth=depth, draft_top_k=top_k)
        self.head, embedding, self.lm_head, self.features = _weights(config, vocab, batch, self.dtype, place)
        self.embed = functools.partial(torch.nn.functional.embedding, weight=embedding)
        known = make_match_inputs([context] * batch, context + 64, vocab_size=3 if tiny else 100)
        self.known = {name: values.to(place) for name, values in known.items()}
        slots = self.known["slots"].long()
        self.roots = self.known["token_ids"][slots, self.known["lens"][slots].long() - 1].long()
        self.lookup = LookupOptions(num_speculative_tokens=nodes, traffic_tokens=0)
        self._searching, self._merging = LookupOnDevice(self.lookup), None
        self._make_pages()

    def _make_pages(self) -> None:
        """Allocate a paged context of random key/value, and the scratch of the levels."""
        config, pages = self.config, -(-self.context // PAGE)
        shape = (self.batch * pages, config.num_key_value_heads, PAGE, 2 * config.head_dim)
        self.cache = _random(shape, self.dtype, self.place, seed=2)
        self.table = torch.arange(self.batch * pages, dtype=torch.int32, device=self.place).view(self.batch, pages)
        self.lens = torch.full((self.batch,), self.context, dtype=torch.int32, device=self.place)
        self.capacity = self.options.draft_top_k * (self.options.draft_depth - 1)
        rows = (2, self.batch * self.capacity, config.num_key_value_heads, config.head_dim)
        self.scratch = torch.zeros(rows, dtype=self.dtype, device=self.place)
        self.requests = torch.arange(self.batch, dtype=torch.int32, device=self.place)

    @torch.inference_mode()
    def draft(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft; return token ids and parents, int64 ``[batch, nodes + 1]``."""
        drafts = []
        if name != "lookup":
            drafts.append(self._grow())
        if name != "eagle2":
            drafts.append(self._search())
        tree = (self._merge(drafts) if len(drafts) > 1 else drafts[0]).tree
        return tree.token_ids, tree.parents

    def _merge(self, drafts: list[Draft]) -> Draft:
        if self.reference:
            return union_reference.merge_drafts(drafts, self.nodes)
        if self._merging is None:
            self._merging = device_proposer.Merging.make(start_weights(len(drafts)), drafts, self.batch)
        return device_proposer.merge_drafts(drafts, self.nodes, self._merging)

    def _search(self) -> Draft:
        known, roots = self.known, self.roots
        slots, token_ids, lens = known["slots"], known["token_ids"], known["lens"]
        if self.reference:
            return draft_matches(token_ids, slots, lens, roots, self.lookup, match_keys_reference)
        context = DeviceDraftContext(roots, slots, token_ids, lens, torch.zeros_like(slots), lambda: None)
        return self._searching.propose(context)

    def _grow(self) -> Draft:
        options = self.options
        likeliest = draft_sampling.likeliest if self.reference else triton_growth.likeliest
        return grow_tree(
            self.roots,
            DraftFeatures(self.features, self.features),
            lambda _, hidden, top_k: likeliest(hidden @ self.lm_head.T, top_k),
            self._forward,
            num_nodes=self.nodes,
            draft_depth=options.draft_depth,
            draft_top_k=options.draft_top_k,
            ops=TORCH_STATIC if self.reference else triton_growth.KERNELS,
        )

    def _forward(
        self, level: int, token_ids: torch.Tensor, features: torch.Tensor, mask: torch.Tensor
    ) -> DraftFeatures:
        """Run the head over the nodes of one level, see ``grow_tree``; kernels mask in words."""
        width, layer = token_ids.shape[1], self.head.layers[0]
        x = self.head.combine(self.embed(token_ids), features)
        positions = torch.full((width,), self.context + level, device=self.place)
        query, key, value = layer.self_attn.project(x, *rotary_table(self.config, positions))
        columns = slice(level * width, (level + 1) * width)
        for kept, rows in zip(self.scratch, (key, value), strict=True):
            kept.view(self.batch, self.capacity, *kept.shape[1:])[:, columns] = rows.transpose(1, 2)
        query = query.transpose(1, 2).flatten(0, 1)
        output = torch.empty_like(query)
        rows = {
            "context_lens": self.lens,
            "query_start": self.requests * width,
            "query_lens": torch.full_like(self.lens, width),
            "tree_start": self.requests * self.capacity,
            "tree_lens": torch.full_like(self.lens, (level + 1) * width),
        }
        pages, scale = KvPages(self.cache, self.table), self.config.head_dim**-0.5
        if self.reference:
            tree_attention_reference(query, output, pages, CpuTreeRows(**rows, mask=mask), *self.scratch, scale)
        else:
            tree = DeviceTreeRows(**rows, bits=mask, max_query_len=width, max_context_len=self.context)
            tree_attention(query, output, pages, tree, *self.scratch, scale)
        found = layer.finish(x, output.unflatten(0, (self.batch, width)).transpose(1, 2))
        return DraftFeatures(found, found)


def _random(shape: tuple[int, ...], dtype: torch.dtype, place: torch.device, seed: int) -> torch.Tensor:
    """Make random values; small ones on the CPU, so that they are the same on every device."""
    small = dtype == torch.float32
    generator = torch.Generator("cpu" if small else place).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).to(place)


@functools.lru_cache(maxsize=8)
def _weights(
    config: HeadConfig, vocab: int, batch: int, dtype: torch.dtype, place: torch.device
) -> tuple[EagleHead, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the head, the embeddings, the LM head and the features of each request's last token."""
    with torch.device("meta"):
        head = EagleHead(config)
    head = head.to(dtype).to_empty(device=place).requires_grad_(False)
    for seed, weights in enumerate(head.parameters()):
        matrix = weights.dim() > 1
        weights.copy_(_random(weights.shape, dtype, place, seed) * weights.shape[1] ** -0.5 if matrix else 1.0)
    head.input_scale.fill_(1.0)
    embedding = _random((vocab, config.hidden_size), dtype, place, 100)
    lm_head = _random((vocab, config.hidden_size), dtype, place, 101) * config.hidden_size**-0.5
    return head, embedding, lm_head, _random((batch, config.hidden_size), dtype, place, 102)
