import json
import shutil

import numpy as np
import pytest

from ragflash.errors import ModelError, ModelMissing
from ragflash.rag import embed
from ragflash.rag.embed import SentenceTransformerEmbedder, packaged_embedder


@pytest.fixture(scope="module")
def model() -> SentenceTransformerEmbedder:
    return packaged_embedder()


def test_knows_dimension_and_fingerprint_without_loading(model):
    assert model.dim == 384
    assert model.fingerprint == packaged_embedder().fingerprint
    assert "dim=384" in model.fingerprint
    assert model._model is None


def test_embeds_unit_rows_in_the_order_given(model):
    texts = ["The warranty lasts two years. " * 4, "A cat.", "How long is the guarantee?"]
    done: list[int] = []
    rows = model.encode_documents(texts, done.append)
    assert rows.shape == (3, 384)
    assert done == [3]
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert rows[0] @ rows[2] > rows[1] @ rows[2]
    assert np.allclose(model.encode_query(texts[2]), rows[2], atol=1e-4)


def test_reads_a_long_text_to_its_end(model):
    start = "The harbour master keeps the register of ships. " * 24
    plain, longer = model.encode_documents([start, start + "Bees make honey in summer. " * 24])
    question = model.encode_query("honey bees")
    assert longer @ question > plain @ question + 0.1


def test_embeds_nothing_as_no_rows(model):
    assert model.encode_documents([]).shape == (0, 384)


def test_prefixes_are_part_of_the_fingerprint(model):
    folder = model._folder
    other = SentenceTransformerEmbedder(folder, query_prefix="query: ")
    assert other.fingerprint != model.fingerprint


def test_content_is_part_of_the_fingerprint(tmp_path):
    def fingerprint(weights: bytes) -> str:
        (tmp_path / "modules.json").write_text(json.dumps([{"path": ""}]))
        (tmp_path / "config.json").write_text('{"hidden_size": 8}')
        (tmp_path / "model.safetensors").write_bytes(weights)
        return SentenceTransformerEmbedder(tmp_path).fingerprint

    assert fingerprint(b"one") != fingerprint(b"two")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelMissing, match="no sentence-transformers model"):
        SentenceTransformerEmbedder(tmp_path)


@pytest.mark.parametrize("damage", ["no weights", "half the weights", "no tokenizer", "no sizes"])
def test_a_damaged_model_is_told_with_what_to_do(model, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(model._folder, folder)
    (weights,) = folder.glob("*.safetensors")
    match damage:
        case "no weights":
            weights.unlink()
        case "half the weights":
            weights.write_bytes(weights.read_bytes()[: 1 << 16])
        case "no tokenizer":
            (folder / "tokenizer.json").write_text("{")
        case "no sizes":
            (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be used \(\w+: .*RAGFLASH_EMBED_MODEL"):
        SentenceTransformerEmbedder(folder).encode_documents(["words"])


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    with pytest.raises(ModelMissing, match=r"ragflash\[models\]"):
        packaged_embedder()


@pytest.mark.parametrize(
    "text",
    [
        "How do I pass it on?",
        "Wie heißt das Paketverwaltungssystem?",
        "Jak zainstalować pakiet?",
        "E4304",
        "?!",
        "",
    ],
)
def test_is_trusted_where_the_vocabulary_has_the_words(model, text):
    assert model.trust(text) == 1.0


@pytest.mark.parametrize(
    "text",
    ["چطور یک دستور را اجرا کنم؟", "Что такое пакет?", "縦組みにする", "보증기간", "การรับประกัน"],
)
def test_is_not_trusted_where_it_has_letters_at_best(model, text):
    assert model.trust(text) == 0.0


def test_is_trusted_in_part_with_english_words_amid_another_script(model):
    assert 0 < model.trust("pTeX の最初の版") < 1
