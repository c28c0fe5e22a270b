"""From a trajectory to what the model reads: packing into token sequences, shared prefixes, and micro-batches.

If every turn continues the turn before, the trajectory becomes one causal sequence. If several turns continue one turn,
the turns form a tree. The tree becomes one sequence in depth-first order, which holds common tokens only once. An
attention mask then lets each token attend only to the tokens on its path in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agent_r1.core.inference import PromptMedia
from agent_r1.core.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """T tokens that the model reads as one sequence, with n predicted tokens in s actions."""

    trajectory: int  # index in the training batch
    ids: Tensor
    position_ids: Tensor
    subtree_end: Tensor
    logit_positions: Tensor
    token_positions: Tensor
    tokens: Tensor
    post_action_states: Tensor
    turns: Tensor
    has_branches: bool  # whether the sequence is a tree with branches, which needs a tree attention mask
    media: tuple[PromptMedia, ...] = ()  # the images in the sequence, at their placeholder tokens

    def __len__(self) -> int:
        return len(self.ids)

    def without_first(self, count: int) -> TokenSequence:
        """Return the sequence without a prefix to which every remaining token attends, and which another pass reads."""
        return replace(
            self,
            ids=self.ids[count:],
            position_ids=self.position_ids[count:],
            subtree_end=self.subtree_end[count:] - count,
            logit_positions=self.logit_positions - count,
            token_positions=self.token_positions - count,
            post_action_states=self.post_action_states - count,
            media=tuple(one.moved(-count) for one in self.media),
        )


Block = Sequence[TokenSequence]
"""Token sequences that must be in the same micro-batch."""


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where the tokens of one turn are in the training batch."""

    turn: int  # index of the turn
    action: int  # index of the turn's first action token
    observation: int | None = None  # index of the first token of the observation before the turn, if it is in the batch


Prediction = tuple[int, int, int]
"""(i, j, k) for a predicted token: the index i of its logits, and its index j in the sequence and k in the batch."""

Packing = Callable[[Trajectory, int, Sequence[TurnPlace]], list[TokenSequence]]
"""(trajectory, its index in the batch, the place of each turn in the batch) -> its token sequences."""


def pack_prefix_tree(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """Return one sequence for each tree of turns with action tokens. It has their common tokens once."""
    children: dict[int | None, list[int]] = {}
    for index, turn in enumerate(trajectory.turns):
        children.setdefault(turn.parent, []).append(index)
    sequences: list[TokenSequence] = []
    for root in children.get(None, []):
        order, stack = list[int](), [root]  # order: the turns of the tree in depth-first order
        while stack:
            order.append(stack.pop())
            stack += reversed(children.get(order[-1], []))  # reversed, so that the first child is on top of the stack
        sequences.append(_pack_tree(trajectory.turns, order, number, places))
    return [sequence for sequence in sequences if len(sequence.tokens)]


def pack_per_turn(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """Return one causal token sequence per turn with action tokens: the whole prompt of the turn, then the action."""
    return [
        _pack_turn(trajectory, turn, number, place)
        for turn, place in zip(trajectory.turns, places, strict=True)
        if turn.action_ids
    ]


def pack_causal(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """Return causal token sequences, for models that ignore a custom attention mask."""
    sequences = pack_prefix_tree(trajectory, number, places)
    has_branches = any(sequence.has_branches for sequence in sequences)
    return pack_per_turn(trajectory, number, places) if has_branches else sequences


def with_length_limit(packing: Packing, max_tokens: Callable[[], int]) -> Packing:
    """Return ``packing``, but split trees of more than ``max_tokens()`` tokens. Loss and gradient do not change."""

    def pack(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
        sequences = packing(trajectory, number, places)
        too_long = any(sequence.has_branches and len(sequence) > max_tokens() for sequence in sequences)
        return pack_per_turn(trajectory, number, places) if too_long else sequences

    return pack


def _pack_tree(turns: Sequence[Turn], order: Sequence[int], number: int, places: Sequence[TurnPlace]) -> TokenSequence:
    ids: list[int] = []
    position_ids: list[int] = []
    media: list[PromptMedia] = []
    predicted: list[Prediction] = []
    action_ends: list[tuple[int, int]] = []  # (position of an action's last token, number of its turn in the batch)
    path_end: dict[int, int] = {}  # turn -> position in the sequence of the last token on its path
    lengths = [len(turns[index].new_ids) + len(turns[index].action_ids) for index in order]
    for index in order:
        turn, place = turns[index], places[index]
        before = -1 if turn.parent is None else path_end[turn.parent]
        depth = position_ids[before] + 1 if before >= 0 else 0  # turns with the same parent begin at the same position
        action_start = len(ids) + len(turn.new_ids)
        if place.observation is not None:
            predicted += _predictions(before, len(ids), len(turn.new_ids), place.observation)
        media += (one.moved(len(ids)) for one in turn.media)
        ids += turn.new_ids + turn.action_ids
        position_ids += range(depth, depth + len(turn.new_ids) + len(turn.action_ids))
        if turn.action_ids:
            # the last token of the prompt predicts the first action token; if the turn has no new tokens, this last
            # token is in the parent turn
            previous = action_start - 1 if turn.new_ids else before
            predicted += _predictions(previous, action_start, len(turn.action_ids), place.action)
            action_ends.append((len(ids) - 1, place.turn))
        path_end[index] = len(ids) - 1 if turn.new_ids or turn.action_ids else before
    # Each token gets the end of the subtree of its turn: the position after the last token of the turn's descendants.
    turn_end: dict[int, int] = {}
    stop = len(ids)
    for index, length in zip(reversed(order), reversed(lengths), strict=True):
        # In this direction, the last descendant of a turn comes before all other descendants of the turn.
        turn_end.setdefault(index, stop)
        parent = turns[index].parent
        if parent is not None:
            turn_end.setdefault(parent, turn_end[index])
        stop -= length
    subtree_end = [turn_end[index] for index, length in zip(order, lengths, strict=True) for _ in range(length)]
    rows = torch.tensor(predicted, dtype=torch.int64).reshape(len(predicted), 3)  # (n, 3)
    ends = torch.tensor(action_ends, dtype=torch.int64).reshape(len(action_ends), 2)  # (s, 2)
    return TokenSequence(
        trajectory=number,
        ids=torch.tensor(ids),
        position_ids=torch.tensor(position_ids),
        subtree_end=torch.tensor(subtree_end),
        logit_positions=rows[:, 0],
        token_positions=rows[:, 1],
        tokens=rows[:, 2],
        post_action_states=ends[:, 0],
        turns=ends[:, 1],
        has_branches=any(end != len(ids) for end in subtree_end),
        media=tuple(media),
    )


def _pack_turn(trajectory: Trajectory, turn: Turn, number: int, place: TurnPlace) -> TokenSequence:
    prompt, action = trajectory.prompt_ids(turn), turn.action_ids
    length = len(prompt) + len(action)
    predicted = _predictions(len(prompt) - 1, len(prompt), len(action), place.action)
    if place.observation is not None:
        start = len(prompt) - len(turn.new_ids)
        predicted = _predictions(start - 1, start, len(turn.new_ids), place.observation) + predicted
    rows = torch.tensor(predicted, dtype=torch.int64).reshape(len(predicted), 3)  # (n, 3)
    return TokenSequence(
        trajectory=number,
        ids=torch.tensor([*prompt, *action]),
        position_ids=torch.arange(length),
        subtree_end=torch.full((length,), length),  # plain causal attention
        logit_positions=rows[:, 0],
        token_positions=rows[:, 1],
        tokens=rows[:, 2],
        post_action_states=torch.tensor([length - 1]),  # the last token of the action
        turns=torch.tensor([place.turn]),
        has_branches=False,
        media=trajectory.prompt_media(turn),
    )


def _predictions(before: int, start: int, count: int, batch_position: int) -> list[Prediction]:
    # the logits at position t - 1 predict token t
    logit_positions = (before, *range(start, start + count - 1))
    places = zip(
        logit_positions, range(start, start + count), range(batch_position, batch_position + count), strict=True
    )
    return list(places) if count else []


MIN_COMMON_PREFIX = 64
"""Minimum number of tokens in the common prefix of all sequences. A shorter prefix is not worth an additional pass."""

MAX_TREE = 4096
"""The most tokens of a merged sequence, with the common prefix, under a mask, which has T * T elements."""

MIN_MERGED = 16
"""With ``by_parts``, sequences are merged from this number of equal first tokens on: in a small model, the added parts
of the attention take as long as 16 tokens."""


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """The properties of the models that determine which prefixes can be shared, and whether sharing saves time."""

    width: int  # hidden size of the models
    across_micro_batches: bool  # whether one pass can compute keys and values for all micro-batches
    by_parts: bool = False
    """Whether the models divide the attention over a tree into parts (:mod:`agent_r1.model.forward`). If so, a
    micro-batch is a single row."""

    def share(self, blocks: Sequence[Block], max_tokens: int) -> tuple[Tensor, list[tuple[TokenSequence, ...]]]:
        """Return (prefix, blocks): the first tokens (S,) that all sequences share, and the blocks without these tokens.

        In the returned blocks, sequences that begin with equal tokens are merged if merging saves time. A merged
        sequence and the prefix have at most ``max_tokens`` tokens together.
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
        # sublists of ``sequences``, so that merging each sublist into one sequence saves time
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
        """Return the estimated cost of reading T = ``tokens`` tokens after a prefix of S tokens: T (6 width + C).

        C is the number of tokens with which attention compares a token. If ``causal``, attention skips later tokens.
        Otherwise it compares all S + T tokens, and then hides some results with a mask.
        """
        attended = prefix + tokens * (0.5 if causal else 1.0)
        return tokens * (6 * self.width + attended)


def common_prefix(sequences: Sequence[TokenSequence]) -> Tensor:
    """Return the ids of the first tokens that all sequences have in common, before any branch: (S,)."""
    # the state of the last token before a prediction stays in the pass of the sequence, because its logits are used
    length = min(int(sequence.logit_positions.min()) for sequence in sequences)
    ids = torch.stack([sequence.ids[:length] for sequence in sequences])  # (B, length)
    has_all = torch.stack([sequence.subtree_end[:length] == len(sequence) for sequence in sequences])  # (B, length)
    count = int(((ids == ids[0]) & has_all).all(0).int().cumprod(0).sum())
    return ids[0, :count] if len(sequences) > 1 and count >= MIN_COMMON_PREFIX else ids[0, :0]


def merge_sequences(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Return one sequence that replaces several sequences, and holds their common first tokens only once.

    The result is a tree of tokens in depth-first order. Two tokens become one token of the tree if they and all tokens
    before them are equal.
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
        trajectory=sequences[0].trajectory,  # a merged sequence can belong to several
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


MAX_PADDING = 0.1
"""The share of padding tokens in a micro-batch of several blocks is below this limit."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B token sequences, padded on the right to T tokens each: n predicted tokens and s actions.

    Token t of row b, and the hidden state at this token, have the index b * T + t.
    """

    ids: Tensor  # (B, T)
    position_ids: Tensor | None  # (B, T) number of earlier tokens to which the token attends; None: causal attention
    subtree_end: Tensor | None  # (B, T) e for token j of a row: the tokens j .. e - 1 attend to it; None: causal
    logit_positions: Tensor  # (n,) index of the hidden state from which each token is predicted
    token_positions: Tensor  # (n,) index of each predicted token in the micro-batch
    tokens: Tensor  # (n,) index of each predicted token in the training batch; on the CPU
    post_action_states: Tensor  # (s,) index of the hidden state at the last token of each action
    turns: Tensor  # (s,) index of each action's turn in the training batch; on the CPU
    num_tokens: int  # without padding
    # Length S of the common prefix of all sequences, of which an earlier pass computes keys and values. Its tokens
    # count in ``position_ids``, but not in ``subtree_end``.
    prefix: int = 0
    media: tuple[tuple[PromptMedia, ...], ...] = ()  # the images of each of the B sequences; () if there are none

    @property
    def padded_size(self) -> int:
        """Number of tokens with keys and values in memory, including padding: rows * (``prefix`` + tokens per row)."""
        return self.ids.shape[0] * (self.prefix + self.ids.shape[1])

    def to(self, device: torch.device) -> MicroBatch:
        # tokens and turns are indices into columns of the training batch, which is always on the CPU
        return replace(
            self,
            ids=self.ids.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            subtree_end=None if self.subtree_end is None else self.subtree_end.to(device),
            logit_positions=self.logit_positions.to(device),
            token_positions=self.token_positions.to(device),
            post_action_states=self.post_action_states.to(device),
        )

    def gather(self, column: Tensor, like: Tensor) -> Tensor:
        """Return the elements of ``column`` (N, ..) at the n predicted tokens: (n, ..)."""
        return column[self.tokens].to(like)


def by_sequence(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    return [(sequence,) for sequence in sequences]


def by_trajectory(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    blocks: dict[int, list[TokenSequence]] = {}
    for sequence in sequences:
        blocks.setdefault(sequence.trajectory, []).append(sequence)
    return [tuple(block) for block in blocks.values()]


def plan_passes(
    blocks: Sequence[Block], max_tokens: int, sharing: PrefixSharing | None
) -> tuple[Tensor, Iterator[MicroBatch]]:
    """Return (prefix, micro-batches): the tokens (S,) that a first pass reads, and what the later passes read.

    ``prefix`` is the common beginning of all sequences, and is not in the micro-batches. S is 0 without ``sharing``. A
    micro-batch has at most ``max_tokens`` tokens, unless it consists of a single block, because a block is never
    divided.
    """
    prefix = torch.zeros(0, dtype=torch.int64)
    if sharing is not None and blocks:
        prefix, blocks = sharing.share(blocks, max_tokens)
    make = make_single_rows if sharing is not None and sharing.by_parts else make_micro_batches
    return prefix, make(blocks, max_tokens, len(prefix))


def make_micro_batches(blocks: Sequence[Block], max_tokens: int, prefix: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches of at most ``max_tokens`` tokens, with little padding. Branched blocks are apart."""
    # sorting is stable, so blocks of equal length remain in the given order
    ranked = sorted(blocks, key=lambda block: (_has_branches(block), -_longest(block)))
    for sequences in _fill(ranked, lambda pending, block: _fits(pending, block, max_tokens, prefix)):
        ids = pad_sequence([sequence.ids for sequence in sequences], batch_first=True)  # (B, T)
        width = ids.shape[1]  # T
        position_ids = subtree_end = None
        if _has_branches(sequences):
            position_ids = pad_sequence([sequence.position_ids for sequence in sequences], batch_first=True)  # (B, T)
            # padding attends to padding only, and no token of a sequence attends to it
            ends = [sequence.subtree_end for sequence in sequences]
            subtree_end = pad_sequence(ends, batch_first=True, padding_value=width)  # (B, T)
        media = tuple(sequence.media for sequence in sequences) if any(one.media for one in sequences) else ()
        starts = range(0, len(sequences) * width, width)  # row b begins at the index b * T
        yield _micro_batch(sequences, starts, ids, position_ids, subtree_end, prefix, media)


def make_single_rows(blocks: Sequence[Block], max_tokens: int, prefix: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches of one row of at most ``max_tokens`` tokens: sequences one after the other."""
    ranked = sorted(blocks, key=lambda block: -sum(map(len, block)))
    for sequences in _fill(ranked, lambda pending, block: prefix + sum(map(len, (*pending, *block))) <= max_tokens):
        *starts, _ = accumulate(map(len, sequences), initial=0)  # index of the first token of each sequence in the row
        placed = list(zip(sequences, starts, strict=True))
        media = tuple(one.moved(start) for sequence, start in placed for one in sequence.media)
        yield _micro_batch(
            sequences,
            starts,
            torch.cat([sequence.ids for sequence in sequences])[None],
            torch.cat([sequence.position_ids for sequence in sequences])[None],
            torch.cat([start + sequence.subtree_end for sequence, start in placed])[None],
            prefix,
            (media,) if media else (),
        )


def _micro_batch(
    sequences: Block,
    starts: Sequence[int],  # index of the first token of each sequence in the micro-batch
    ids: Tensor,
    position_ids: Tensor | None,
    subtree_end: Tensor | None,
    prefix: int,
    media: tuple[tuple[PromptMedia, ...], ...],
) -> MicroBatch:
    placed = list(zip(sequences, starts, strict=True))
    return MicroBatch(
        ids=ids,
        position_ids=position_ids,
        subtree_end=subtree_end,
        logit_positions=torch.cat([start + sequence.logit_positions for sequence, start in placed]),
        token_positions=torch.cat([start + sequence.token_positions for sequence, start in placed]),
        tokens=torch.cat([sequence.tokens for sequence in sequences]),
        post_action_states=torch.cat([start + sequence.post_action_states for sequence, start in placed]),
        turns=torch.cat([sequence.turns for sequence in sequences]),
        num_tokens=sum(map(len, sequences)),
        prefix=prefix,
        media=media,
    )


def _fill(blocks: Sequence[Block], fits: Callable[[Block, Block], bool]) -> Iterator[Block]:
    pending: list[TokenSequence] = []
    for block in blocks:
        if pending and not fits(pending, block):
            yield pending
            pending = []
        pending += block
    if pending:
        yield pending


def _fits(pending: Block, block: Block, max_tokens: int, prefix: int) -> bool:
    # number of tokens of the micro-batch after the block is added: with padding, and without padding
    rows = len(pending) + len(block)
    padded = rows * max(_longest(pending), _longest(block))
    num_tokens = sum(map(len, pending)) + sum(map(len, block))
    same_mask = _has_branches(pending) == _has_branches(block)
    return same_mask and padded + rows * prefix <= max_tokens and padded - num_tokens < MAX_PADDING * padded


def _longest(sequences: Block) -> int:
    return max(map(len, sequences))


def _has_branches(sequences: Block) -> bool:
    return any(sequence.has_branches for sequence in sequences)
