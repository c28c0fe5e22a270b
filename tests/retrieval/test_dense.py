"""Dense search finds the largest inner products, independently of how they are computed, and caches vectors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_files import SHARED, real_data

from agent_r1.core.errors import InvalidInput
from agent_r1.model.encoder import load_encoder
from agent_r1.retrieval import dense as vectors_module
from agent_r1.retrieval.client import open_retriever
from agent_r1.retrieval.config import SearchConfig, check
from agent_r1.retrieval.dense import VECTORS, DenseIndex, FaissVectors, TorchVectors, build_faiss, open_dense
from agent_r1.retrieval.retriever import Passage, corpus_checksum, read_corpus
from agent_r1.tasksets.multihop import recall
from agent_r1.tasksets.multihop.questions import read_questions


@pytest.fixture
def config(tmp_path: Path, encoder_folder: Path, passages) -> SearchConfig:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"title": p.title, "text": p.text}) for p in passages), "utf-8")
    return SearchConfig(corpus=corpus, encoder=str(encoder_folder), cache=tmp_path / "cache")


def random_vectors(count: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


# ---- inner products


@pytest.mark.parametrize("chunk", [7, 50, 1000])
def test_the_largest_inner_products_do_not_depend_on_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors_module, "CHUNK", chunk)
    matrix, queries = random_vectors(200, 0), random_vectors(9, 1)
    expected = np.argsort(-(queries.astype(np.float64) @ matrix.T.astype(np.float64)), axis=1)[:, :12]
    assert TorchVectors(matrix, "cpu").nearest(queries, 12) == expected.tolist()
    assert len(TorchVectors(matrix, "cpu").nearest(queries, 500)[0]) == 200


@pytest.mark.parametrize("chunk", [2, 100])
def test_equal_vectors_keep_their_order(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors_module, "CHUNK", chunk)
    matrix = np.repeat(random_vectors(2, 0), 5, axis=0)
    (found,) = TorchVectors(matrix, "cpu").nearest(matrix[:1], 10)
    assert sorted(found[:5]) == [0, 1, 2, 3, 4] and found == sorted(found[:5]) + sorted(found[5:])


def test_faiss_finds_the_same_passages() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed (extra faiss)")
    matrix, queries = random_vectors(300, 0), random_vectors(9, 1)
    exact = TorchVectors(matrix, "cpu").nearest(queries, 5)
    assert FaissVectors(build_faiss(matrix, "Flat")).nearest(queries, 5) == exact
    with pytest.raises(InvalidInput, match=r"faiss: got 'Nonsense"):
        build_faiss(matrix, "Nonsense")


def test_a_missing_faiss_is_reported_with_its_package(config: SearchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InvalidInput, match=r"faiss: got no such package; pip install 'agent-r1\[faiss\]'"):
        open_dense(config.model_copy(update={"faiss": "Flat"}), read_corpus(config.corpus))


# ---- search


def test_dense_search_ranks_by_the_encoder(config: SearchConfig) -> None:
    index = open_dense(config, read_corpus(config.corpus))
    found = index.search(["who rules the river Alba", "a king", "Zoë"], 2)
    assert [best.title for best, _ in found] == ["Alba", "Bruno", "Zoë"]
    assert [len(row) for row in index.search(["lake"], 99)] == [5]
    assert index.search([]) == []
    assert index.search(["lone \ud800 surrogate lake"], 2)[0][0].title in ("Carla", "Lake district")


def test_dense_search_works_with_faiss(config: SearchConfig) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed (extra faiss)")
    passages = read_corpus(config.corpus)
    queries = ["who rules the river Alba", "a king", "Zoë"]
    exact = open_dense(config, passages).search(queries, 3)
    for factory in ("Flat", "IVF2,Flat"):
        changed = config.model_copy(update={"faiss": factory, "probes": 2})
        assert open_dense(changed, passages).search(queries, 3) == exact


def test_the_prefix_is_added_to_queries_only(config: SearchConfig) -> None:
    passages = read_corpus(config.corpus)
    plain = open_dense(config, passages)
    led = open_dense(config.model_copy(update={"query_prefix": "king king king king "}), passages)
    assert plain.search(["lake"], 1)[0][0].title != "Bruno"
    assert led.search(["lake"], 1)[0][0].title == "Bruno"


# ---- the cache on disk


def test_vectors_are_computed_once(config: SearchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    passages = read_corpus(config.corpus)
    first = open_dense(config, passages).search(["lake"], 3)

    def never(*arguments: object) -> None:
        raise AssertionError("vectors were made again")

    monkeypatch.setattr("agent_r1.retrieval.dense._write_vectors", never)
    assert open_dense(config, passages).search(["lake"], 3) == first
    others = [*passages, Passage("new", "passage")]
    changed = config.model_copy(update={"passage_prefix": "passage: "})
    shorter = config.model_copy(update={"max_tokens": 4})
    for settings, some in ((config, others), (config, passages[::-1]), (changed, passages), (shorter, passages)):
        with pytest.raises(AssertionError, match="made again"):
            open_dense(settings, some)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damaged_vectors_are_computed_again(damage: str, config: SearchConfig) -> None:
    passages = read_corpus(config.corpus)
    first = open_dense(config, passages).search(["lake"], 3)
    (vectors,) = config.cache.glob(f"*/{VECTORS}")
    whole = vectors.read_bytes()
    if damage == "flip":
        vectors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        vectors.write_bytes(whole[:-8])
    elif damage == "remove":
        vectors.unlink()
    else:
        (vectors.parent / "manifest.json").write_text("{", "utf-8")
    assert open_dense(config, passages).search(["lake"], 3) == first
    assert vectors.read_bytes() == whole
    assert {path.name for path in config.cache.iterdir()} == {vectors.parent.name, f".{vectors.parent.name}.lock"}


def test_a_cache_that_cannot_be_written_is_an_error(config: SearchConfig, passages) -> None:
    config.cache.write_text("a file", "utf-8")
    with pytest.raises(InvalidInput, match=r"cache: got .*; name a writable folder"):
        open_dense(config, passages)


def test_the_cache_key_depends_on_passage_borders() -> None:
    assert corpus_checksum([Passage("ab", "c")]) != corpus_checksum([Passage("a", "bc")])
    assert corpus_checksum([Passage("a", "b")]) != corpus_checksum([Passage("a", "b"), Passage("a", "b")])


# ---- configuration


def test_a_toml_file_describes_a_search(config: SearchConfig, tmp_path: Path) -> None:
    path = tmp_path / "search.toml"
    path.write_text(f'corpus = "corpus.jsonl"\nencoder = "{config.encoder}"\ncache = "{config.cache}"\n', "utf-8")
    index = open_retriever(path)
    assert isinstance(index, DenseIndex)
    assert index.search(["a king"], 1)[0][0].title == "Bruno"
    path.write_text('corpus = "corpus.jsonl"\npoolin = "cls"\n', "utf-8")
    with pytest.raises(InvalidInput, match="did you mean 'pooling'"):
        open_retriever(path)


@pytest.mark.parametrize("settings", [{"pooling": "cls"}, {"query_prefix": "q: "}, {"faiss": "Flat"}])
def test_a_setting_without_effect_is_refused(settings: dict[str, str], config: SearchConfig) -> None:
    with pytest.raises(InvalidInput, match="got it without an encoder"):
        check(SearchConfig(corpus=config.corpus, **settings))  # type: ignore[arg-type]
    check(SearchConfig(corpus=config.corpus, encoder="x", **settings))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="probes: got 3"):
        check(SearchConfig(corpus=config.corpus, encoder="x", faiss="Flat", probes=3))


# ---- on the benchmark's own files


@real_data
def test_on_hotpotqa_a_bag_of_words_finds_most_supporting_titles(benchmark_script, tmp_path: Path) -> None:
    corpus = SHARED / "hotpotqa_corpus.jsonl"
    folder = benchmark_script.bag_of_words(tmp_path / "encoder", read_corpus(corpus))
    questions = read_questions(SHARED / "hotpotqa_train_60.json")
    config = SearchConfig(corpus=corpus, encoder=str(folder), cache=tmp_path / "cache")
    index = open_dense(config, read_corpus(corpus))
    found = recall(questions, index)
    assert 0.6 < found < 0.75
    # Control: the vectors of other passages find almost nothing.
    encoder = load_encoder(str(folder), "auto", 512, 64, "cpu")
    (vectors,) = config.cache.glob(f"*/{VECTORS}")
    shuffled = DenseIndex(read_corpus(corpus), encoder, TorchVectors(np.roll(np.load(vectors), 7, axis=0), "cpu"))
    assert recall(questions, shuffled) < 0.1
