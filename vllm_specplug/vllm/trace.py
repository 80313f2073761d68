"""Write the first verified trees of a server to a file, for inspection."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_specplug.cpu.drafters.flat_draft import FlatDraft
from vllm_specplug.types import TokenTree, Walk

MAX_TREES = 2000


class TreeTrace:
    """Writes one JSON object per tree: request_id, token_ids, parents (by row, the root first), accepted_rows.

    If the draft is known, also log_values (per node, without the root) and, for merged drafts, sources (the names of
    each node's proposers, without the root): see ``FlatDraft``.
    """

    def __init__(self, path: str | None):
        #: None writes nothing.
        self.path, self.written = None if path is None else Path(path), 0
        if self.path is not None:
            self.path.write_text("")

    def write(self, req_ids: list[str], tree: TokenTree, walk: Walk, drafts: dict[str, FlatDraft]) -> None:
        """Write the verified trees of one step; ``drafts`` has the proposed drafts by request."""
        if self.path is None or self.written >= MAX_TREES:
            return
        lines = []
        counts = zip(req_ids, tree.num_rows.tolist(), walk.num_emitted.tolist(), strict=False)
        for index, (req_id, num_rows, emitted) in enumerate(counts):
            if num_rows > 1 and emitted:
                line = {
                    "request_id": req_id,
                    "token_ids": tree.token_ids[index, :num_rows].tolist(),
                    "parents": tree.parents[index, :num_rows].tolist(),
                    "accepted_rows": walk.path_rows[index, :emitted].tolist(),
                }
                draft = drafts.get(req_id)
                if draft is not None and draft.token_ids[: num_rows - 1] == line["token_ids"][1:]:
                    line["log_values"] = [round(value, 4) for value in draft.log_values[: num_rows - 1]]
                    if draft.sources:
                        line["sources"] = draft.sources[: num_rows - 1]
                lines.append(json.dumps(line))
        self.written += len(lines)
        with self.path.open("a") as file:
            file.writelines(line + "\n" for line in lines)
