"""Prefix sharing: tokens with which several sequences begin are computed only once.

First, the tokens with which all sequences begin, such as the system prompt, are cut off. The keys and values of these
tokens are computed once, and all micro-batches read the result. Second, if the remaining tokens of several sequences
begin with equal tokens, as in attempts at one task, the sequences become the branches of one tree of tokens.

Sequences with images share nothing: different images can have equal tokens, and the position of a token can differ from
its depth in the tree.

Shapes: S first tokens that all sequences share, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_r1.data.sequences import Block, TokenSequence

MIN_COMMON_PREFIX = 64
"""Minimum number of tokens in the common prefix of all sequences. A shorter prefix is not worth an additional pass."""

MAX_TREE = 4096
"""Maximum number of tokens of a merged sequence, including the common prefix of all sequences.

The limit applies only if attention uses a mask, because the mask of T tokens has T * T elements.
"""

MIN_MERGED = 16
"""With ``PrefixSharing.by_parts``, two sequences are merged only if at least this number of first tokens are equal.

Each merge adds parts to the computation of the attention (:mod:`agent_r1.model.tree_attention`). In a small model, the
added parts take about as much time as reading 16 tokens.
"""


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """The properties of the models that determine which prefixes can be shared, and whether sharing saves time.

    Attributes:
        width: the hidden size of the models.
        across_micro_batches: whether all micro-batches can read keys and values that one earlier pass computed. False
            with activation checkpointing.
        by_parts: whether the models divide the attention over a tree into parts (:mod:`agent_r1.model.tree_attention`).
            If so, a micro-batch is a single row.
    """

    width: int
    across_micro_batches: bool
    by_parts: bool = False

    def share(self, blocks: Sequence[Block], max_tokens: int) -> tuple[Tensor, list[tuple[TokenSequence, ...]]]:
        """Return (prefix, blocks): the first tokens that all sequences share, and the blocks without these tokens.

        The prefix has the shape (S,). S is 0 if the sequences share no prefix. In the returned blocks, sequences that
        begin with equal tokens are merged if merging saves time (:func:`merge_sequences`). A merged sequence and the
        prefix have at most ``max_tokens`` tokens together.
        """
        sequences = [sequence for block in blocks for sequence in block]
        prefix = torch.zeros(0, dtype=torch.int64)
        if self.across_micro_batches and not any(sequence.media for sequence in sequences):
            prefix = common_prefix(sequences)
        # Blocks of one sequence are merged with each other. The sequences of a larger block must stay in this block.
        single, others = list[TokenSequence](), list[tuple[TokenSequence, ...]]()
        for block in blocks:
            rest = tuple(sequence.without_first(len(prefix)) for sequence in block)
            if any(sequence.media for sequence in rest):
                others.append(rest)
            elif len(rest) == 1:
                single += rest
            else:
                others.append(tuple(map(merge_sequences, self._divide(rest, max_tokens, len(prefix)))))
        return prefix, [*((merge_sequences(part),) for part in self._divide(single, max_tokens, len(prefix))), *others]

    def _divide(self, sequences: Sequence[TokenSequence], max_tokens: int, prefix: int) -> list[list[TokenSequence]]:
        """Divide ``sequences`` into sublists, so that merging each sublist into one sequence saves time.

        ``prefix`` is the number of tokens in the common prefix, which is not in ``sequences``. A merged sequence and
        the prefix have at most ``max_tokens`` tokens together. A sequence that is too long before merging is alone in
        its sublist.
        """
        parts: list[list[TokenSequence]] = []
        size, cost = 0, 0.0  # of the last part, when merged
        for sequence in sorted(sequences, key=lambda one: one.ids.tolist()):  # sequences that begin alike are neighbors
            alone = self.operations(len(sequence), prefix, causal=not sequence.has_branches)
            if parts:
                previous = parts[-1][-1]
                length = min(len(previous), len(sequence))
                same_ids = previous.ids[:length] == sequence.ids[:length]
                same_positions = previous.position_ids[:length] == sequence.position_ids[:length]
                equal = int((same_ids & same_positions).int().cumprod(0).sum())  # length of the common prefix
                joint = size + len(sequence) - equal
                joint_cost = self.operations(joint, prefix, causal=False)
                saves = equal >= MIN_MERGED if self.by_parts else joint_cost <= cost + alone
                if saves and prefix + joint <= (max_tokens if self.by_parts else min(max_tokens, MAX_TREE)):
                    parts[-1].append(sequence)
                    size, cost = joint, joint_cost
                    continue
            parts.append([sequence])
            size, cost = len(sequence), alone
        return parts

    def operations(self, tokens: int, prefix: int, *, causal: bool) -> float:
        """Return the estimated cost of reading ``tokens`` tokens after ``prefix`` tokens.

        Let T be ``tokens``, S ``prefix``, E ``width``, and C the average number of tokens with which attention compares
        a token. If ``causal`` is true, attention skips later tokens, and C is S + T / 2. If ``causal`` is false,
        attention compares each token with all S + T tokens, and then hides some results with a mask. So C is S + T.

        In one layer, the linear maps take 12 E^2 multiplications per token, and attention takes 2 E C multiplications
        per token. The cost is the number of multiplications for all T tokens, divided by 2 E: T * (6 E + C).
        """
        attended = prefix + tokens * (0.5 if causal else 1.0)
        return tokens * (6 * self.width + attended)


def common_prefix(sequences: Sequence[TokenSequence]) -> Tensor:
    """Return the ids of the first tokens that all sequences have in common: (S,).

    If a sequence has branches, the result ends before the first branch of this sequence. The result also ends before
    the smallest index in the ``logit_positions`` of any sequence. S is 0 for a single sequence, or if there are fewer
    than ``MIN_COMMON_PREFIX`` common tokens.
    """
    length = min(int(sequence.logit_positions.min()) for sequence in sequences)
    ids = torch.stack([sequence.ids[:length] for sequence in sequences])  # (B, length)
    has_all = torch.stack([sequence.subtree_end[:length] == len(sequence) for sequence in sequences])  # (B, length)
    count = int(((ids == ids[0]) & has_all).all(0).int().cumprod(0).sum())
    return ids[0, :count] if len(sequences) > 1 and count >= MIN_COMMON_PREFIX else ids[0, :0]


def merge_sequences(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Return one sequence that replaces several sequences, and holds their common first tokens only once.

    The result is a tree of tokens in depth-first order. Two tokens become one token of the tree if they and all tokens
    before them are equal. A token that is predicted in one of ``sequences`` is also predicted in the result. The result
    has the ``trajectory`` of the first sequence.

    Example: the sequences 70 71 72 73 and 70 71 74 become
        ids           70 71 72 73 74
        position_ids   0  1  2  3  2
        subtree_end    5  5  4  4  5   (index after the last token of the token's subtree)
    """
    if len(sequences) == 1:
        return sequences[0]
    # The nodes of the tree are its tokens, in the order in which they are added: a parent comes before its children.
    # Node 0 is the root, which stands before all tokens and is no token itself.
    ids, positions, parents = [-1], [int(sequences[0].position_ids[0]) - 1], [0]
    children: dict[tuple[int, int], int] = {}  # (node, token id) -> node
    nodes: list[list[int]] = []  # for each sequence, the node of each of its T tokens
    for sequence in sequences:
        path = [0]  # the nodes from the root to the last token
        nodes.append([])
        for token, position in zip(sequence.ids.tolist(), sequence.position_ids.tolist(), strict=True):
            del path[position - positions[0] :]  # the parent is one position before the token
            node = children.setdefault((path[-1], token), len(ids))
            if node == len(ids):
                ids.append(token)
                positions.append(position)
                parents.append(path[-1])
            path.append(node)
            nodes[-1].append(node)
    # Depth-first order: the place of each node (-1 for the root), and the place after the last node of its subtree.
    sizes = [1] * len(ids)  # of the subtrees
    for node in range(len(ids) - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    places = [-1] * len(ids)
    free = [0] * len(ids)  # where the next child of a node goes
    for node in range(1, len(ids)):
        parent = parents[node]
        places[node], free[node] = free[parent], free[parent] + 1
        free[parent] += sizes[node]
    place = torch.tensor(places)
    end = place + torch.tensor(sizes)
    order = place.argsort()[1:]  # the nodes in depth-first order, without the root
    placed = [(sequence, place[torch.tensor(path)]) for sequence, path in zip(sequences, nodes, strict=True)]
    return TokenSequence(
        trajectory=sequences[0].trajectory,
        ids=torch.tensor(ids)[order],
        position_ids=torch.tensor(positions)[order],
        subtree_end=end[order],
        logit_positions=torch.cat([moved[sequence.logit_positions] for sequence, moved in placed]),
        token_positions=torch.cat([moved[sequence.token_positions] for sequence, moved in placed]),
        tokens=torch.cat([sequence.tokens for sequence in sequences]),
        post_action_states=torch.cat([moved[sequence.post_action_states] for sequence, moved in placed]),
        turns=torch.cat([sequence.turns for sequence in sequences]),
        has_branches=bool((end[order] != len(order)).any()),
    )
