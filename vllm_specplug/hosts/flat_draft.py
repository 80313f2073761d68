"""One request's draft as the scheduler knows it: a flat list of tokens, with what the list does not say beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_specplug.types import Draft


@dataclass(frozen=True)
class FlatDraft:
    """A request's drafted nodes, the root left out: entry ``i`` is row ``i + 1`` of its tree.

    Attributes:
        token_ids: of the nodes, parent-first.
        parents: row of each node's parent.
        log_values: see ``Draft``.
        sources: names of the proposers of each node; empty where there is only one proposer.
    """

    token_ids: list[int]
    parents: list[int]
    log_values: list[float]
    sources: list[list[str]] = field(default_factory=list)


def flatten(draft: Draft) -> list[FlatDraft]:
    """The drafts of a batch, request by request."""
    tree, names = draft.tree, draft.source_names
    sizes = tree.num_rows.tolist()
    token_ids, parents, log_values = tree.token_ids.tolist(), tree.parents.tolist(), draft.log_values.tolist()
    bits = [()] * len(sizes) if draft.source_bits is None else draft.source_bits.tolist()
    return [
        FlatDraft(
            token_ids[request][1:size],
            parents[request][1:size],
            log_values[request][1:size],
            [[name for s, name in enumerate(names) if word >> s & 1] for word in bits[request][1:size]],
        )
        for request, size in enumerate(sizes)
    ]
