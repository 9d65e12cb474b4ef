"""Cache-aware 64/1.5: the engine that first served the longest known prefix, unless the load is out of balance.

Source: `CacheAwarePolicy` (for HTTP: `select_worker_with_text`) in `model_gateway/src/policies/cache_aware.rs`, and
`Tree` in `crates/kv_index/src/string_tree.rs`, of lightseekorg/smg, with its defaults: cache_threshold 0.3,
balance_abs_threshold 64, balance_rel_threshold 1.5. The SGLang router is the same program. Before it became SMG, it
sent a prompt below the threshold to the worker with the smallest tree; SMG sends it to the one with the least load.

1. Where the largest load exceeds the smallest by more than 64 requests and by more than the factor 1.5, the engine
   with the least load gets the request.
2. Else the tree is searched. Where it matches more than 0.3 of the prompt, the owner of the deepest node reached gets
   it: the engine whose request made that node.
3. Else the engine with the least load gets it. In each case the prompt is inserted for the engine.

Left out is the eviction at 67,108,864 characters: no run of the benchmark has as many.
"""

from __future__ import annotations

from benchmarks.fleet_routers.rule import Request, Rule, smallest

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


class CacheAware(Rule):
    """Affinity by a radix tree, with a gate on the imbalance of requests."""

    name = "cache-aware"

    def __init__(self, engines: int, cache_tokens: int) -> None:
        super().__init__(engines, cache_tokens)
        self.tree = RadixTree()

    def select(self, request: Request) -> int:
        """See `Rule`."""
        most, least = max(self.requests), min(self.requests)
        if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
            engine = smallest(self.requests)
        else:
            matched, owner = self.tree.match(request.prompt)
            share = matched / len(request.prompt) if request.prompt else 0.0
            engine = owner if owner is not None and share > CACHE_THRESHOLD else smallest(self.requests)
        self.tree.insert(request.prompt, engine)
        return engine


class Node:
    """A stretch of text after its parent's, and the engine whose request made it."""

    __slots__ = ("children", "owner", "text")

    def __init__(self, text: bytes, owner: int | None) -> None:
        self.text = text
        self.owner = owner
        self.children: dict[int, Node] = {}


class RadixTree:
    """Prompts that were sent. Time is in proportion to the prompt, whatever the tree holds."""

    def __init__(self) -> None:
        self.root = Node(b"", None)

    def match(self, text: bytes) -> tuple[int, int | None]:
        """How many bytes of `text` are known from its beginning, and the owner of the node where that ends."""
        node, at = self.root, 0
        while at < len(text) and (child := node.children.get(text[at])) is not None:
            shared = shared_prefix(child.text, text, at)
            node, at = child, at + shared
            if shared < len(child.text):
                break
        return at, node.owner

    def insert(self, text: bytes, owner: int) -> None:
        """Adds the part of `text` that is not known yet, for `owner`."""
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                node.children[text[at]] = Node(text[at:], owner)
                return
            shared = shared_prefix(child.text, text, at)
            if shared < len(child.text):
                child = self._split(node, child, shared)
            node, at = child, at + shared

    def _split(self, parent: Node, child: Node, at: int) -> Node:
        upper = Node(child.text[:at], child.owner)
        parent.children[upper.text[0]] = upper
        child.text = child.text[at:]
        upper.children[child.text[0]] = child
        return upper


def shared_prefix(known: bytes, text: bytes, at: int) -> int:
    """How many bytes `known` and `text` from `at` on have in common at their beginning."""
    if text.startswith(known, at):
        return len(known)
    low, high = 0, min(len(known), len(text) - at)
    while low < high:  # the slices are compared in C
        middle = (low + high + 1) // 2
        if text.startswith(known[low:middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low
