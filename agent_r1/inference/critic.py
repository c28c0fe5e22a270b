"""The value function of a critic: one forward pass predicts the values of many continuations of one context.

The continuations form a tree, because they share prefixes. The tree is one row of the forward pass, and each token
attends only to the context and to its ancestors in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import ScoredTokens
from agent_r1.core.threads import WorkerThread
from agent_r1.model.forward import CachedPrefix, supports_tree_mask
from agent_r1.model.value_head import ValueModel


@dataclass(slots=True)
class TokenTree:
    """The continuations of a context as a tree of tokens. A prefix that several continuations share occurs once.

    Node 0, the root, is the last token of the context. ``token_ids``, ``logprobs`` and ``parents`` have one element per
    node. The descendants of a node come directly after the node. ``parents`` holds the index of each node's parent, and
    -1 for the root. ``ends`` holds the index of the last node of each continuation.

    Example:
        the continuations (7, 8) and (7, 9): token_ids [.., 7, 8, 9], parents [-1, 0, 1, 1], ends [2, 3]
    """

    token_ids: list[int]
    logprobs: list[float]
    parents: list[int]
    ends: list[int] = field(default_factory=list)

    def add(self, branch: ScoredTokens, children: dict[tuple[int, int], int]) -> None:
        """Add the continuation ``branch`` to the tree.

        ``children`` maps (index of a node, token) to the index of the node's child with this token. Make one empty
        dictionary for a tree, and pass this dictionary in each call. The method adds the new nodes to the dictionary.
        """
        node = 0
        for token, logprob in zip(branch.token_ids, branch.logprobs, strict=True):
            child = children.setdefault((node, token), len(self.token_ids))
            if child == len(self.token_ids):
                self.token_ids.append(token)
                self.logprobs.append(logprob)
                self.parents.append(node)
            node = child
        self.ends.append(node)

    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def subtree_ends(self) -> list[int]:
        """Return, for each node, the index after the last node of the node's subtree."""
        ends = [node + 1 for node in range(len(self.parents))]
        for node in range(len(ends) - 1, 0, -1):
            ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        return ends


def make_tree(last: ScoredTokens, branches: Sequence[ScoredTokens]) -> TokenTree:
    """Return a tree of tokens that contains all ``branches``, the continuations of a context.

    ``last`` holds one token: the last token of the context. This token becomes the root of the tree.
    """
    tree, children = TokenTree([*last.token_ids], [*last.logprobs], [-1]), dict[tuple[int, int], int]()
    # In the order of their tokens, so that the descendants of a node follow it without a gap.
    order = sorted(range(len(branches)), key=lambda index: branches[index].token_ids)
    for index in order:
        tree.add(branches[index], children)
    tree.ends = [end for _, end in sorted(zip(order, tree.ends, strict=True))]
    return tree


class Critic:
    """A ``ValueFunction`` that predicts values with ``model``. Forward passes run in a worker thread.

    Raises:
        InvalidInput: the model's attention is not plain causal attention, for example because of a sliding window.
    """

    def __init__(self, model: ValueModel) -> None:
        if not supports_tree_mask(model.backbone):
            do = "use a critic with plain causal attention: continuations of a context are one row of its pass"
            raise InvalidInput("critic", got=type(model.backbone).__name__, do=do)
        self._model = model.eval()
        self._prefixes: dict[str, CachedPrefix] = {}
        self._worker = WorkerThread("critic", lambda: EngineError("the critic's thread has ended"))

    async def values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        return await self._worker.run(self._values, session_id, context, branches)

    async def release(self, session_id: str) -> None:
        self._prefixes.pop(session_id, None)

    async def close(self) -> None:
        await self._worker.close_and_wait()

    @torch.inference_mode()
    def _values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        """Return the value of the state after each branch. A branch is a continuation of ``context``.

        The numbers S, C and n count tokens. The KV cache already has the first S tokens of the context. C is the number
        of the remaining tokens of the context. The branches form a :class:`TokenTree` with n nodes. The root of the
        tree is the last token of the context, so C and n both count this token. The forward pass reads C - 1 + n
        tokens.
        """
        prefix = self._prefixes.setdefault(session_id, CachedPrefix())
        prefix.keep(context.token_ids[:-1])
        kept, count = prefix.num_tokens, len(context.token_ids) - prefix.num_tokens  # S, C
        tree = make_tree(ScoredTokens(context.token_ids[-1:], context.logprobs[-1:]), branches)
        ids = [*context.token_ids[kept:-1], *tree.token_ids]  # C - 1 + n
        logprobs = [*context.logprobs[kept:-1], *tree.logprobs]
        positions = [*range(kept, kept + count - 1), *(kept + count - 1 + depth for depth in tree.depths())]
        # All tokens after a token of the context attend to it.
        subtree_end = [len(ids)] * (count - 1) + [count - 1 + end for end in tree.subtree_ends()]
        device = self._model.head.weight.device
        values = self._model(
            torch.tensor([ids], device=device),
            torch.tensor([positions], device=device),
            torch.tensor([subtree_end], device=device),
            torch.tensor([logprobs], device=device),
            prefix,
        )[0]  # (C - 1 + n,)
        prefix.append(context.token_ids[kept:])  # the nodes after the root are dropped by the next keep()
        return [float(values[count - 1 + end]) for end in tree.ends]
