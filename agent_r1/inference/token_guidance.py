"""Value guidance of single tokens: values change the probabilities of the k most likely tokens.

A state s is the context and the tokens sampled so far. The letter ``a`` stands for a token that follows s. pi(a | s) is
the policy's probability of this token. V(s) is the predicted reward after the state s. Q(s, a) is V of the next state:
s followed by ``a``. beta is the temperature of the values. C is the set of the k most likely tokens after s. P is the
sum of pi(a | s) over C.
Each token is sampled from the guided distribution q:

    q(a | s) = P pi(a | s) exp(Q(s, a) / beta) / sum over b in C of pi(b | s) exp(Q(s, b) / beta)    a in C
    q(a | s) = pi(a | s)                                                                            otherwise

With k = 1, q is pi.

Let y be a whole sequence, with the reward R and the policy's probability pi(y). Let E[.. | s] be the mean over the
policy's continuations of s. If C is the whole vocabulary and exp(V(s) / beta) = E[exp(R / beta) | s], q samples y with
the probability pi(y) exp(R / beta) / Z. The constant Z makes the sum of all probabilities 1.
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
    """Sampled tokens with two log-probabilities for each token.

    ``completion`` has log q, where q is the guided distribution from which the tokens were sampled. ``scored`` has
    log pi, where pi is the policy.
    """

    completion: Completion
    scored: ScoredTokens


def top_branches(draft: Completion, sampled: ScoredTokens, start: int) -> list[ScoredTokens]:
    """Return the token sequences that a value function has to score."""
    path, branches = sampled, []
    for place, top in enumerate(draft.top_logprobs, start=start):
        branches += [path + ScoredTokens((token,), (logprob,)) for token, logprob in top]
        path = path + ScoredTokens((draft.token_ids[place],), (draft.logprobs[place],))
    return branches


def guided_logprobs(candidates: TopLogprobs, values: Sequence[float], beta: float) -> list[float]:
    """Return the log-probability log q of each candidate, where q is the guided distribution.

    ``candidates`` are pairs (token, log pi), where pi is the policy's probability of the token. ``values`` holds the
    predicted reward Q after each candidate. P is the sum of pi over the candidates. The result is:

        log q = log P + log softmax(log pi + Q / beta)

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
    """Choose again each new token of ``draft``, from the guided distribution q, until a token differs from the draft.

    The draft was sampled from the policy. For each new token, the draft also lists the candidates: the policy's most
    likely tokens at the same index.

    - If the drafted token is a candidate, one of the candidates is sampled from q (:func:`guided_logprobs`). At
      temperature 0, the candidate with the largest q is chosen.
    - If the drafted token is not a candidate, the drafted token is kept. No new choice is needed, because q changes the
      probabilities of the candidates only.

    After the first chosen token that differs from the drafted token, the rest of the draft is dropped. The result holds
    the tokens of ``before`` and the chosen tokens.

    Args:
        draft: the tokens of ``before``, followed by new tokens with their candidates.
        before: the tokens that are already chosen.
        values: the predicted reward Q after each candidate, in the order of :func:`top_branches`.
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
