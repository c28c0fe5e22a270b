"""Measure retrieval: recall@5 on HotpotQA, and milliseconds per query over a larger corpus.

    python benchmarks/retrieval.py --questions hotpot.json --passages corpus.jsonl --corpus big.jsonl --queries q.json

BM25 and a dense encoder are measured in this process and over HTTP with a server in another process. The script makes
the encoder itself, so that it needs no download: a BERT whose single layer adds nothing to its word vectors, which are
random directions with the rarity of the word as length. This is a weighted bag of words in 256 dimensions. It shows
that dense retrieval is correct and what it costs, not how well a trained encoder retrieves.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from agent_r1.model.load import quiet_transformers
from agent_r1.retrieval.client import RemoteRetriever, open_search
from agent_r1.retrieval.config import SearchConfig
from agent_r1.retrieval.retriever import Passage, Retriever, read_corpus
from agent_r1.tasksets.multihop import recall
from agent_r1.tasksets.multihop.questions import read_questions

WIDTH = 256
BATCH = 64
"""Queries per search; the search tool sends as many together."""

ROUNDS = 5

SINGLE = 50
"""Number of queries that are searched one by one."""


def bag_of_words(folder: Path, passages: Sequence[Passage]) -> Path:
    """Write an encoder with the vocabulary of ``passages`` to ``folder``. Equal passages give equal encoders."""
    texts = [set(re.findall(r"\w+|[^\w\s]+", passage.indexed_text.lower())) for passage in passages]
    document_frequency = Counter(word for text in texts for word in text)
    words = ["[PAD]", "[UNK]", *sorted(document_frequency)]
    model = BertModel(_config(len(words)), add_pooling_layer=False)
    _make_linear(model)
    rarity = torch.tensor([0.0, 0.0, *(math.log(len(texts) / document_frequency[word]) for word in words[2:])])
    directions = torch.randn(len(words), WIDTH, generator=torch.Generator().manual_seed(0)) / math.sqrt(WIDTH)
    model.embeddings.word_embeddings.weight.data = directions * rarity[:, None]
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    return folder


def _config(words: int) -> BertConfig:
    return BertConfig(
        vocab_size=words,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=WIDTH,
        max_position_embeddings=512,
        layer_norm_eps=1e6,  # together with weights of 1e3, layer normalization keeps the length of a vector
    )


def _make_linear(model: BertModel) -> None:
    """Set all weights so that attention, feed-forward layers and positions add nothing."""
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1e3 if name.endswith("LayerNorm.weight") else 0.0)


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[RemoteRetriever]:
    """Run ``agent-r1 retriever`` in its own process and yield its client."""
    command = [sys.executable, "-m", "agent_r1.cli", "retriever", *options, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
    try:
        assert process.stdout is not None
        yield RemoteRetriever(json.loads(process.stdout.readline())["url"], seconds=60)
    finally:
        process.terminate()
        process.wait()


def milliseconds(retriever: Retriever, queries: Sequence[str], size: int) -> float:
    """Return the median time per query over several rounds, with ``size`` queries per search."""
    retriever.search(queries[:size])
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for start in range(0, len(queries), size):
            retriever.search(queries[start : start + size])
        rounds.append(1000 * (time.perf_counter() - began) / len(queries))
    return statistics.median(rounds)


def measure(arguments: argparse.Namespace, folder: Path) -> Mapping[str, Mapping[str, float]]:
    """Return the measurements of each method."""
    questions = read_questions(arguments.questions)
    queries = [question.text for question in read_questions(arguments.queries)]
    rows: dict[str, Mapping[str, float]] = {}
    for method in ("bm25", "dense"):
        retriever = open_search(_search_config(method, arguments.passages, folder))
        config = _search_config(method, arguments.corpus, folder)
        local = open_search(config)
        with running_server(_options(config)) as remote:
            rows[method] = {
                "recall@5": recall(questions, retriever),
                "in process": milliseconds(local, queries, BATCH),
                "in process, one by one": milliseconds(local, queries[:SINGLE], 1),
                "HTTP": milliseconds(remote, queries, BATCH),
                "HTTP, one by one": milliseconds(remote, queries[:SINGLE], 1),
            }
    return rows


def _search_config(method: str, corpus: Path, folder: Path) -> SearchConfig:
    if method == "bm25":
        return SearchConfig(corpus=corpus)
    encoder = folder / corpus.stem
    if not encoder.is_dir():
        bag_of_words(encoder, read_corpus(corpus))
    return SearchConfig(corpus=corpus, encoder=str(encoder), cache=folder / "cache")


def _options(config: SearchConfig) -> list[str]:
    given = config.model_dump(mode="json", exclude_unset=True)
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--questions", type=Path, required=True, help="questions with the titles of their supporting passages"
    )
    parser.add_argument("--passages", type=Path, required=True, help="the passages for recall")
    parser.add_argument("--corpus", type=Path, required=True, help="the passages for the time measurement")
    parser.add_argument("--queries", type=Path, required=True, help="the questions for the time measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    names = list(next(iter(rows.values())))
    print(f"| ms per query, batches of {BATCH} | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for method, row in rows.items():
        print(f"| {method} | " + " | ".join(f"{row[name]:.3f}" for name in names) + " |")


if __name__ == "__main__":
    main()
