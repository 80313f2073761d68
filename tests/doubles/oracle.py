"""Slow, independent answers in pure Python: dicts, recursion and lists, no tensors.

A tree is a list of ``(token, parent)`` rows with ``(root token, -1)`` first; a pool is the same without the root,
parents being pool indices, -1 for the root.
"""

import random


def random_tree(rng, max_nodes, vocab_size):
    """A random tree of 0 to ``max_nodes`` nodes, its shape anything between a chain and a star."""
    reach = rng.choice([1, 2, 4, max_nodes + 1])  # How far back a parent may lie: 1 gives a chain.
    rows = [(rng.randrange(vocab_size), -1)]
    for row in range(1, rng.randint(0, max_nodes) + 1):
        rows.append((rng.randrange(vocab_size), rng.randrange(max(0, row - reach), row)))
    return rows


def path_to(rows, row):
    """Rows from the root to ``row``."""
    parent = rows[row][1]
    return [row] if parent < 0 else [*path_to(rows, parent), row]


def depth(rows, row):
    return len(path_to(rows, row)) - 1


def walk(rows, choose, max_emitted=None):
    """Walk with ``choose(row, tokens emitted so far) -> token``; returns (tokens, rows whose logits gave them)."""
    children = {}
    for row, (token, parent) in enumerate(rows):
        if parent >= 0:
            children.setdefault(parent, {}).setdefault(token, row)  # The first of equal siblings.
    tokens, path, row = [], [], 0
    while row is not None and (max_emitted is None or len(tokens) < max_emitted):
        token = choose(row, tuple(tokens))
        tokens.append(token)
        path.append(row)
        row = children.get(row, {}).get(token)
    return tokens, path


def rerank(pool, values, num_nodes):
    """Grow the best tree from the root: take, again and again, the best node whose parent is in (ties: the first).

    Returns the pool indices taken, in ascending order.  ``values`` of None are nodes that do not exist.
    """
    taken = set()
    while len(taken) < num_nodes:
        frontier = [
            node
            for node, (_, parent) in enumerate(pool)
            if node not in taken and values[node] is not None and (parent < 0 or parent in taken)
        ]
        if not frontier:
            break
        taken.add(max(frontier, key=lambda node: (values[node], -node)))
    return sorted(taken)


def as_rows(pool, taken, root):
    """The tree made of the pool nodes ``taken`` (ascending) under the token ``root``."""
    row_of = {-1: 0, **{node: row for row, node in enumerate(taken, start=1)}}
    return [(root, -1), *((pool[node][0], row_of[pool[node][1]]) for node in taken)]


def commit(slots, context_len, path):
    """The slots of one request after the commit: the path's entries behind the context, garbage (None) behind."""
    tree_slots = slots[context_len:]
    return slots[:context_len] + [tree_slots[row] for row in path] + [None] * (len(tree_slots) - len(path))


def all_shapes(num_nodes):
    """Every list of parents, parent-first, of ``num_nodes`` nodes under a root."""
    if num_nodes == 0:
        return [[-1]]
    return [[*shape, parent] for shape in all_shapes(num_nodes - 1) for parent in range(len(shape))]


def seeded(seed):
    return random.Random(seed)
