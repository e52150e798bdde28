from tests.rag.conftest import HashEmbedder


def test_another_model_is_refused_with_the_command_that_helps(run, run_json, law, monkeypatch):
    run("ingest", law)
    same = run("reindex")
    assert same.stdout == "all documents are embedded with the configured model already\n"
    other = HashEmbedder(dim=32, name="other")
    monkeypatch.setattr("ragflash.cli.parts.make_embedder", lambda settings: other)
    refused = run("search", "keeper")
    assert refused.exit_code == 1
    assert "was built with the embedding model [hash dim=64]" in refused.stderr
    assert "run `ragflash reindex`" in refused.stderr
    assert run_json("search", "keeper")["error"]["code"] == "index_mismatch"
    done = run_json("reindex")
    assert done == {
        "former_models": ["hash dim=64"],
        "documents": 1,
        "passages": 1,
        "embedded_passages": 1,
    }
    assert "law.txt, page" in run("search", "keeper").stdout
    monkeypatch.setattr("ragflash.cli.parts.make_embedder", lambda settings: HashEmbedder())
    shown = run("reindex")
    assert shown.stdout == "1 passages of 1 documents are embedded anew\n"
    assert "passages embedded 1 of 1" in shown.stderr
