"""P4 and P5: a shared prefix counts as if each branch had its own copy, and node values add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from learning import close
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.ops.group_stats import standardize
from agent_r1.algorithms.ops.ratio import weighted_logprob
from agent_r1.algorithms.ops.returns import discounted_sums, generalized_advantages, leaves_below


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Nodes, each after its parent, with random rewards and values; several roots are possible."""

    before: Tensor
    rewards: Tensor
    values: Tensor
    after: Tensor

    @property
    def paths(self) -> list[list[int]]:
        """From a root to each leaf."""
        parents = self.before.tolist()
        leaves = [node for node in range(len(parents)) if node not in parents]
        return [list(reversed(list(_upwards(leaf, parents)))) for leaf in leaves]

    @property
    def counts(self) -> Tensor:
        """How many leaves stand at or below each node, counted path by path."""
        return torch.bincount(torch.tensor([node for path in self.paths for node in path])).double()


def _upwards(node: int, parents: list[int]) -> Iterator[int]:
    while node >= 0:
        yield node
        node = parents[node]


def _tree(draws: list[int], seed: int) -> Tree:
    before = torch.tensor([-1, *(draw % (node + 2) - 1 for node, draw in enumerate(draws))])
    return Tree(
        before, *torch.randn(3, len(before), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    )


TREES = st.builds(_tree, st.lists(st.integers(0, 5039), max_size=9), st.integers(0, 999))
DISCOUNT = st.sampled_from([0.0, 0.5, 0.9, 1.0])

Shared = Callable[[Tree, float, float], tuple[Tensor, Tensor]]
"""(tree, gamma, lambda) -> the advantage of each node, computed once, and its weight in the loss."""


def ours(tree: Tree, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    advantage = generalized_advantages(tree.rewards, tree.values, tree.after, tree.before, gamma, lam)
    return advantage, leaves_below(tree.before)


def sharing_changes_nothing(shared: Shared, tree: Tree, gamma: float, lam: float) -> None:
    """The advantages of a node's copies add up to its own times its weight, and so do the gradients of the loss."""
    logprobs = torch.linspace(-2, -1, len(tree.before), dtype=torch.float64).requires_grad_()
    apart, loss = torch.zeros_like(tree.rewards), torch.zeros(()).double()
    for path in tree.paths:
        chain, nodes = torch.arange(-1, len(path) - 1), torch.tensor(path)
        copies = generalized_advantages(tree.rewards[nodes], tree.values[nodes], tree.after[nodes], chain, gamma, lam)
        apart = apart.index_add(0, nodes, copies)
        loss = loss + weighted_logprob(torch.ones_like(copies), copies, logprobs[nodes]).sum()
    advantage, weight = shared(tree, gamma, lam)
    assert close(weight * advantage, apart)
    once = (weight * weighted_logprob(torch.ones_like(advantage), advantage, logprobs)).sum()
    assert close(torch.autograd.grad(once, logprobs)[0], torch.autograd.grad(loss, logprobs)[0])


def weighing_one(tree: Tree, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Wrong: a shared node counts once in the loss."""
    return ours(tree, gamma, lam)[0], torch.ones_like(tree.rewards)


def averaging_children(tree: Tree, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Wrong: every child counts the same, however many leaves stand below it."""
    advantage = torch.zeros_like(tree.rewards)
    for node in reversed(range(len(advantage))):
        children = (tree.before == node).nonzero().squeeze(1)
        following = tree.values[children].mean() if len(children) else tree.after[node]
        carried = advantage[children].mean() if len(children) else 0.0
        advantage[node] = tree.rewards[node] + gamma * following - tree.values[node] + gamma * lam * carried
    return advantage, tree.counts


def test_sharing_a_prefix_changes_nothing() -> None:
    holds(sharing_changes_nothing, ours, TREES, DISCOUNT, DISCOUNT)
    rejected(sharing_changes_nothing, weighing_one, TREES, DISCOUNT, DISCOUNT)
    rejected(sharing_changes_nothing, averaging_children, TREES, DISCOUNT, DISCOUNT)


Spread = Callable[[Tensor, Tensor], Tensor]
"""(a number at each leaf, 0 elsewhere; the node before each) -> the number of each node."""


def our_means(at_leaves: Tensor, before: Tensor) -> Tensor:
    return discounted_sums(at_leaves, before, 1.0)


def relative_advantages_can_be_shared(means: Spread, tree: Tree) -> None:
    """GRPO over the paths of a tree: a shared node has its leaves' mean advantage, and their number as weight."""
    leaves = torch.tensor([path[-1] for path in tree.paths])
    advantage = standardize(tree.rewards[leaves], torch.zeros_like(leaves), 1e-6)
    apart = torch.zeros_like(tree.rewards)
    for path, number in zip(tree.paths, advantage, strict=True):
        apart[path] += number
    at_leaves = torch.zeros_like(tree.rewards).index_put((leaves,), advantage)
    assert close(leaves_below(tree.before) * means(at_leaves, tree.before), apart)


def means_of_children(at_leaves: Tensor, before: Tensor) -> Tensor:
    """Wrong here (TreeRPO's value): the mean over children, not over leaves."""
    means = at_leaves.clone()
    for node in reversed(range(len(means))):
        children = (before == node).nonzero().squeeze(1)
        means[node] = means[children].mean() if len(children) else means[node]
    return means


def test_relative_advantages_on_a_shared_prefix() -> None:
    holds(relative_advantages_can_be_shared, our_means, TREES)
    rejected(relative_advantages_can_be_shared, means_of_children, TREES)


# local advantages of nodes worth the mean of their leaves


def local_advantages(tree: Tree, means: Spread) -> tuple[Tensor, Tensor]:
    """V(node) - V(parent) of each node (0 at a root), as GAE with lambda 0; and the leaves' rewards."""
    leaves = [path[-1] for path in tree.paths]
    rewards = torch.zeros_like(tree.rewards)
    rewards[leaves] = tree.rewards[leaves]
    worth = means(rewards, tree.before)
    parent = torch.where(tree.before >= 0, worth[tree.before.clamp(min=0)], worth)
    return generalized_advantages(rewards, parent, torch.zeros_like(worth), tree.before, 1.0, 0.0), rewards


def local_advantages_add_up_along_a_path(means: Spread, tree: Tree) -> None:
    """To the leaf's reward less that of the mean leaf under the same root."""
    local, rewards = local_advantages(tree, means)
    for path in tree.paths:
        rivals = [other[-1] for other in tree.paths if other[0] == path[0]]
        assert close(local[path].sum(), rewards[path[-1]] - rewards[rivals].mean())


def siblings_weighted_by_leaves_cancel(means: Spread, tree: Tree) -> None:
    local, _ = local_advantages(tree, means)
    for parent in tree.before[tree.before >= 0].unique():
        siblings = tree.before == parent
        assert abs(float((tree.counts * local)[siblings].sum())) < 1e-9


def discounted_means(at_leaves: Tensor, before: Tensor) -> Tensor:
    """Wrong here: a node's worth shrinks with its distance from the leaves."""
    return discounted_sums(at_leaves, before, 0.9)


def test_local_advantages_of_a_tree() -> None:
    holds(local_advantages_add_up_along_a_path, our_means, TREES)
    rejected(local_advantages_add_up_along_a_path, discounted_means, TREES)
    holds(siblings_weighted_by_leaves_cancel, our_means, TREES)
    rejected(siblings_weighted_by_leaves_cancel, means_of_children, TREES)
