"""Prefix sharing: if several sequences begin with the same tokens, these tokens are computed only once.

Sharing has two steps. First, the tokens with which all sequences begin, such as the system prompt and the schemas of
the tools, are cut off. The models compute the keys and values of these tokens once, and all micro-batches read them.
Second, if the other tokens of several sequences begin with equal tokens, as in the attempts at one task, these
sequences become the branches of one tree of tokens.

Sequences with images share nothing, because two different images can have equal tokens, and because the position of a
token can differ from its depth in the tree.

Shapes: S first tokens that all sequences share, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_r1.data.sequences import Block, TokenSequence

MIN_COMMON_PREFIX = 64
"""If all sequences begin with at least this number of equal tokens, these tokens are computed once, in a pass before
all micro-batches. A shorter prefix does not justify an additional pass."""

MAX_TREE = 4096
"""Largest number of tokens, including the shared prefix, of a tree into which sequences are merged. The limit holds if
the attention over the tree is computed with a mask, which has as many elements as the square of this number."""

MIN_MERGED = 16
"""Two sequences are merged into a tree of tokens if at least this number of tokens at their beginning are equal.

This limit is used if the attention over a tree is computed in parts (:mod:`agent_r1.model.tree_attention`). A merged
tree has more of these parts. In a small model, the additional parts take about as long as this number of tokens.
"""


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """The properties of the models that determine which prefixes can be shared, and whether sharing saves time.

    Sequences that begin with equal tokens can be merged into a tree of tokens, which holds the equal tokens only once.

    Attributes:
        width: the hidden size of the models. The width determines how much attention costs in comparison to the linear
            layers.
        across_micro_batches: whether micro-batches can read the keys and values of tokens that were computed before the
            micro-batches. False with activation checkpointing.
        by_parts: whether the models divide the attention over a tree into parts
            (:mod:`agent_r1.model.tree_attention`). If so, a tree costs less than the separate sequences, and a
            micro-batch is a single row.
    """

    width: int
    across_micro_batches: bool
    by_parts: bool = False

    def share(self, blocks: Sequence[Block], max_tokens: int) -> tuple[Tensor, list[tuple[TokenSequence, ...]]]:
        """Return (shared prefix, blocks): the tokens with which all sequences begin, and blocks of the other tokens.

        The prefix (S,) is read before the blocks. A block is a tuple of sequences that must be in the same micro-batch.
        In the returned blocks, sequences that begin with equal tokens are merged if this saves time. A merged sequence
        holds the equal tokens only once (:func:`merge_sequences`). It has at most ``max_tokens`` tokens, including the
        S tokens of the prefix.
        """
        sequences = [sequence for block in blocks for sequence in block]
        prefix = torch.zeros(0, dtype=torch.int64)
        if self.across_micro_batches and not any(sequence.media for sequence in sequences):
            prefix = common_prefix(sequences)
        rest = [tuple(sequence.without_first(len(prefix)) for sequence in block) for block in blocks]
        return prefix, merge_blocks(rest, self, max_tokens, len(prefix))

    def operations(self, tokens: int, prefix: int, *, causal: bool) -> float:
        """Return the estimated cost of reading ``tokens`` tokens after ``prefix`` tokens.

        The cost is the number of multiplications in one layer, divided by 2 E, with E = ``width``. For each token, the
        linear maps of a layer take 12 E^2 multiplications. The attention of a token takes 2 E multiplications for each
        token with which it is compared.

        If ``causal`` is true, a token is compared with all ``prefix`` tokens and, on average, with half of the
        ``tokens`` tokens. Otherwise the tokens are a tree, and each token is compared with all tokens, because the
        mask of the tree hides tokens only after the comparison.
        """
        attended = prefix + tokens * (0.5 if causal else 1.0)
        return tokens * (6 * self.width + attended)


def common_prefix(sequences: Sequence[TokenSequence]) -> Tensor:
    """Return the tokens with which all sequences begin, as token ids (S,).

    A sequence can be a tree of tokens with branches. The prefix then ends before the first branch. It also ends before
    the first token whose hidden state predicts a token of the training batch. S is 0 if there is only one sequence, or
    if fewer than ``MIN_COMMON_PREFIX`` tokens are common to all sequences.
    """
    length = min(int(sequence.logit_positions.min()) for sequence in sequences)
    ids = torch.stack([sequence.ids[:length] for sequence in sequences])  # (B, length)
    has_all = torch.stack([sequence.subtree_end[:length] == len(sequence) for sequence in sequences])  # (B, length)
    count = int(((ids == ids[0]) & has_all).all(0).int().cumprod(0).sum())
    return ids[0, :count] if len(sequences) > 1 and count >= MIN_COMMON_PREFIX else ids[0, :0]


def merge_blocks(
    blocks: Iterable[Block], sharing: PrefixSharing, max_tokens: int, prefix: int
) -> list[tuple[TokenSequence, ...]]:
    """Merge sequences that begin with equal tokens, if this saves time. Return the blocks of the merged sequences.

    A block is a tuple of sequences that must be in the same micro-batch. Blocks of one sequence are merged with other
    blocks of one sequence. The sequences of a larger block are only merged with each other. A merged sequence has at
    most ``max_tokens`` tokens, including the ``prefix`` tokens before it.
    """
    alone, merged = list[TokenSequence](), list[tuple[TokenSequence, ...]]()
    for block in blocks:
        if any(sequence.media for sequence in block):
            merged.append(tuple(block))
        elif len(block) == 1:
            alone += block
        else:
            merged.append(tuple(merge_sequences(one) for one in _divide(block, sharing, max_tokens, prefix)))
    return [*((merge_sequences(one),) for one in _divide(alone, sharing, max_tokens, prefix)), *merged]


def _divide(
    sequences: Sequence[TokenSequence], sharing: PrefixSharing, max_tokens: int, prefix: int
) -> list[list[TokenSequence]]:
    """Return the sequences, divided into parts. :func:`merge_sequences` will merge each part into one sequence.

    Sequences are in the same part if merging them saves time, which ``sharing`` estimates. A merged sequence has at
    most ``max_tokens`` tokens, including the ``prefix`` tokens before it.
    """
    parts: list[list[TokenSequence]] = []
    size, cost = 0, 0.0  # of the last part, when merged
    for sequence in sorted(sequences, key=lambda one: one.ids.tolist()):  # sequences that begin alike are neighbors
        alone = sharing.operations(len(sequence), prefix, causal=not sequence.has_branches)
        if parts:
            equal = _equal_tokens(parts[-1][-1], sequence)
            joint = size + len(sequence) - equal
            joint_cost = sharing.operations(joint, prefix, causal=False)
            saves = equal >= MIN_MERGED if sharing.by_parts else joint_cost <= cost + alone
            if saves and prefix + joint <= (max_tokens if sharing.by_parts else min(max_tokens, MAX_TREE)):
                parts[-1].append(sequence)
                size, cost = joint, joint_cost
                continue
        parts.append([sequence])
        size, cost = len(sequence), alone
    return parts


def _equal_tokens(one: TokenSequence, other: TokenSequence) -> int:
    """Return the length of the common prefix of two sequences, in which tokens and positions are equal."""
    length = min(len(one), len(other))
    equal = (one.ids[:length] == other.ids[:length]) & (one.position_ids[:length] == other.position_ids[:length])
    return int(equal.int().cumprod(0).sum())


def merge_sequences(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Return one sequence that replaces several sequences, and holds their common tokens only once.

    The result is a tree of tokens in depth-first order. Two tokens become one token if they and all tokens before them
    are equal. The result has the predictions of all ``sequences``. If two predicted tokens become one token, both
    predictions remain. The field ``trajectory`` is copied from the first sequence.

    Example: 5 6 7 8 and 5 6 9 become ids 5 6 7 8 9, position_ids 0 1 2 3 2, subtree_end 5 5 4 4 5
    """
    if len(sequences) == 1:
        return sequences[0]
    tree = _TokenTree(first_position=int(sequences[0].position_ids[0]))
    paths = [tree.add(sequence) for sequence in sequences]
    place, end = tree.depth_first()
    order = place.argsort()[1:]  # the nodes in depth-first order, without the root

    def places(name: Callable[[TokenSequence], Tensor]) -> Tensor:
        return torch.cat([place[path[name(sequence)]] for sequence, path in zip(sequences, paths, strict=True)])

    return TokenSequence(
        trajectory=sequences[0].trajectory,
        ids=torch.tensor(tree.ids)[order],
        position_ids=torch.tensor(tree.positions)[order],
        subtree_end=end[order],
        logit_positions=places(lambda sequence: sequence.logit_positions),
        token_positions=places(lambda sequence: sequence.token_positions),
        tokens=torch.cat([sequence.tokens for sequence in sequences]),
        post_action_states=places(lambda sequence: sequence.post_action_states),
        turns=torch.cat([sequence.turns for sequence in sequences]),
        has_branches=bool((end[order] != len(order)).any()),
    )


class _TokenTree:
    """A tree whose nodes are tokens. Nodes are numbered in the order in which they are added, so a parent has a lower
    number than its children.

    Node 0 is the root, which stands before all tokens and is no token itself.
    """

    def __init__(self, first_position: int) -> None:
        self.ids, self.positions, self._parents = [-1], [first_position - 1], [0]
        self._children: dict[tuple[int, int], int] = {}  # (node, token id) -> node

    def add(self, sequence: TokenSequence) -> Tensor:
        """Add the tokens of a sequence, except tokens that the tree already has. Return the node of each token (T,)."""
        path, nodes = [0], []  # path: the nodes from the root to the last token
        for token, position in zip(sequence.ids.tolist(), sequence.position_ids.tolist(), strict=True):
            depth = position - self.positions[0]
            del path[depth:]  # the parent has depth - 1
            node = self._children.setdefault((path[-1], token), len(self.ids))
            if node == len(self.ids):
                self.ids.append(token)
                self.positions.append(position)
                self._parents.append(path[-1])
            path.append(node)
            nodes.append(node)
        return torch.tensor(nodes)

    def depth_first(self) -> tuple[Tensor, Tensor]:
        """Return (places, ends) of all nodes, as two tensors (nodes,).

        The place of a node is its index in depth-first order. The root is not counted, and has the place -1. The end of
        a node is the place after the last node of its subtree.
        """
        count = len(self.ids)
        sizes = [1] * count  # of the subtrees
        for node in range(count - 1, 0, -1):
            sizes[self._parents[node]] += sizes[node]
        place = [-1] * count
        free = [0] * count  # where the next child of a node goes
        for node in range(1, count):
            parent = self._parents[node]
            place[node], free[node] = free[parent], free[parent] + 1
            free[parent] += sizes[node]
        return torch.tensor(place), torch.tensor(place) + torch.tensor(sizes)
