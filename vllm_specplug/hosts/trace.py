"""Write the first trees of a server to a file, for looking at them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_specplug.types import TokenTree, Walk

MAX_TREES = 2000


@dataclass
class TreeTrace:
    """One JSON object per tree: request_id, token_ids, parents (rows, the root first), accepted_rows."""

    path: Path
    written: int = 0

    @classmethod
    def open(cls, path: str | None) -> TreeTrace | None:
        """A trace that starts with an empty file, or None without a path."""
        if path is None:
            return None
        Path(path).write_text("")
        return cls(Path(path))

    def write(self, req_ids: list[str], tree: TokenTree, walk: Walk) -> None:
        if self.written >= MAX_TREES:
            return
        lines = []
        for index, req_id in enumerate(req_ids):
            num_rows, emitted = int(tree.num_rows[index]), int(walk.num_emitted[index])
            if num_rows > 1 and emitted:
                lines.append(
                    json.dumps(
                        {
                            "request_id": req_id,
                            "token_ids": tree.token_ids[index, :num_rows].tolist(),
                            "parents": tree.parents[index, :num_rows].tolist(),
                            "accepted_rows": walk.path_rows[index, :emitted].tolist(),
                        }
                    )
                )
        self.written += len(lines)
        with self.path.open("a") as file:
            file.writelines(line + "\n" for line in lines)
