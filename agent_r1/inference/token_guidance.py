"""Value guidance of single tokens: values change the probabilities of the k most likely tokens.

pi is the policy. V(s) is the predicted reward after the state s. Q(s, a) is V of the state s a, which is s followed by
the token a. C is the set of the k most likely tokens after s. P is the sum of pi(a | s) over C. The tokens are sampled
from

    q(a | s) = P pi(a | s) exp(Q(s, a) / beta) / sum over b in C of pi(b | s) exp(Q(s, b) / beta)    a in C
    q(a | s) = pi(a | s)                                                                            otherwise

With k = 1, q is pi. If C is the whole vocabulary and exp(V(s) / beta) = E[exp(R / beta) | s], sequences sampled from q
have the probability pi exp(R / beta) / Z.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.core.inference import Completion, ScoredTokens, TopLogprobs
from agent_r1.inference.particles import normalize


@dataclass(frozen=True, slots=True)
class GuidedTokens:
    """Sampled tokens with log q in ``completion`` and log pi in ``scored``.

    q is the guided distribution from which the tokens were sampled. pi is the policy.
    """

    completion: Completion
    scored: ScoredTokens


def top_branches(draft: Completion, sampled: ScoredTokens, start: int) -> list[ScoredTokens]:
    """Return the token sequences that a value function has to score.

    The first ``start`` tokens of ``draft`` are the tokens of ``sampled``. All later tokens are new. At the index of
    each new token, ``draft`` also lists the most likely tokens: the candidates. For each candidate, one sequence is
    returned: the tokens of ``draft`` before this index, and then the candidate.

    Example:
        start 0, tokens (5, 6) with the candidates (5, 7) and (6, 8): the sequences (5), (7), (5, 6), (5, 8)
    """
    path, branches = sampled, []
    for place, top in enumerate(draft.top_logprobs, start=start):
        branches += [path + ScoredTokens((token,), (logprob,)) for token, logprob in top]
        path = path + ScoredTokens((draft.token_ids[place],), (draft.logprobs[place],))
    return branches


def guided_logprobs(candidates: TopLogprobs, values: Sequence[float], beta: float) -> list[float]:
    """Return log q(a | s) of each candidate: log P + log softmax(log pi(a | s) + Q(s, a) / beta).

    ``candidates`` are pairs (token a, log pi(a | s)), ``values`` are Q(s, a), and P is the sum of pi over the
    candidates.

    Example:
        >>> guided_logprobs(((7, math.log(0.5)), (8, math.log(0.25))), [0.0, 0.0], beta=0.1)
        [-0.693..., -1.386...]
    """
    log_total = math.log(sum(math.exp(logprob) for _, logprob in candidates))  # log P
    scores = [logprob + value / beta for (_, logprob), value in zip(candidates, values, strict=True)]
    return [log_total + math.log(max(weight, 1e-300)) for weight in normalize(scores)]


def choose_tokens(
    draft: Completion,
    before: GuidedTokens,
    values: Sequence[float],
    beta: float,
    temperature: float,
    rng: random.Random,
) -> GuidedTokens:
    """Choose a token from the guided distribution q for each new token of a draft, and return the chosen tokens.

    The candidates at an index of the draft are the tokens that the policy finds most likely there. If the drafted token
    is a candidate, one of the candidates is sampled from q (:func:`guided_logprobs`). At temperature 0, the candidate
    with the largest q is chosen. If the drafted token is not a candidate, the drafted token itself is chosen: q gives
    such a token the same probability as the policy.

    The result ends after the first chosen token that differs from the drafted token.

    Args:
        draft: the tokens of ``before``, followed by new tokens with their candidates.
        before: the tokens that are already chosen.
        values: Q(s, a) of each candidate, in the order of :func:`top_branches`.
        beta: the temperature of the values in q.
        temperature: the sampling temperature of the policy.
    """
    start, logprobs, scored = len(before.scored.token_ids), [*before.completion.logprobs], before.scored
    for place, top in enumerate(draft.top_logprobs, start=start):
        drafted, rank = draft.token_ids[place], (place - start) * len(top)
        guided = guided_logprobs(top, values[rank : rank + len(top)], beta)
        if drafted not in (token for token, _ in top):
            logprobs.append(draft.logprobs[place])
            scored = scored + ScoredTokens((drafted,), (draft.logprobs[place],))
            continue
        if temperature == 0:
            index = max(range(len(top)), key=guided.__getitem__)
        else:
            index = rng.choices(range(len(top)), normalize(guided))[0]
        token, logprob = top[index]
        logprobs.append(guided[index])
        scored = scored + ScoredTokens((token,), (logprob,))
        if token != drafted:
            break
    length = len(scored.token_ids)
    spans = tuple(span for span in draft.version_spans if span.start < length)
    completion = replace(
        draft, token_ids=scored.token_ids, logprobs=tuple(logprobs), version_spans=spans, top_logprobs=()
    )
    return GuidedTokens(completion, scored)
