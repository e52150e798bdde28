"""`ragflash serve` with stand-ins for both models: everything else is as it is installed."""

import re
import zlib

import numpy as np

import ragflash.cli.parts
import ragflash.cli.serve
from ragflash.__main__ import main
from ragflash.rag.embed import TokenVectors
from tests.api.fakes import FakeEngine

DIM = 32


class Embedder:
    """Counts words by their hashes, and remembers nothing."""

    fingerprint = "counted words"
    dim = DIM

    def encode_documents(self, texts, progress=None):
        rows = np.stack([self.encode_query(text) for text in texts])
        if progress is not None:
            progress(len(texts))
        return rows

    def encode_query(self, text):
        row = np.full(DIM, 1e-3, np.float32)
        for word in re.findall(r"\w+", text.lower()):
            row[zlib.crc32(word.encode()) % DIM] += 1
        return row / np.linalg.norm(row)

    def encode_tokens(self, texts):
        words = [tuple(text.split()) for text in texts]
        return [TokenVectors(each, self.encode_documents([*each, ""])[:-1]) for each in words]

    def trust(self, text):
        return 1.0


class Tokenizer:
    fingerprint = "0" * 64

    def encode(self, text):
        return [len(word) for word in text.split()]


class Engine(FakeEngine):
    async def drop_source(self, source_id: str) -> int:
        return 0

    def close(self) -> None:
        self.is_alive = False


if __name__ == "__main__":
    ragflash.cli.parts.make_embedder = lambda settings: Embedder()
    ragflash.cli.parts._load_tokenizer = lambda settings: Tokenizer()
    ragflash.cli.model_host.start_model = lambda settings, archive: Engine()
    main()
