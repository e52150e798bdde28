"""Write `llama_cpp.json`: what llama.cpp computes of the models that tests load.

    python -m tests.golden.make_peer_goldens FOLDER

Needs the package `llama-cpp-python`, which the tests do not. llama.cpp rounds activations when
weights are packed, so it is given files rewritten with float32 weights; FOLDER keeps them.
"""

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, quants

from ragflash.gguf.packaged import packaged_model_path
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer
from tests.gemma import assembled_gemma_path
from tests.golden.make_smollm2_goldens import ROOT
from tests.models.families import FAMILIES
from tests.models.toy_files import TOKENS, write_gguf

NUM_TEXT_TOKENS = 512
NUM_TOY_TOKENS = 150
NUM_TOP = 5


def rewrite(source: Path, target: Path) -> Path:
    """Copy a GGUF file with every tensor unpacked to float32."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, value = field.types[0], field.contents()
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=sub_type)
    for tensor in reader.tensors:
        values = np.array(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def peer_logits(path: Path, ids: Sequence[int]) -> torch.Tensor:
    """Run llama.cpp over a text on the CPU; logits `[T, V]` float32."""
    from llama_cpp import Llama

    model = Llama(
        str(path), n_ctx=1024, n_batch=1024, logits_all=True, n_gpu_layers=0, verbose=False,
        flash_attn=False,
    )  # fmt: skip
    model.eval(list(ids))
    return torch.from_numpy(np.array(model.scores[: len(ids)], np.float32))


def perplexity(logits: torch.Tensor, ids: Sequence[int]) -> float:
    """Return that of every token but the first, given those before it."""
    targets = torch.tensor(ids[1:])
    return torch.nn.functional.cross_entropy(logits[:-1].double(), targets).exp().item()


def text_of(path: Path, *, bos: Sequence[int] = ()) -> list[int]:
    """Return the first tokens of a fixed text."""
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    text = (ROOT / "ragflash" / "samples" / "bug-reporting.txt").read_text(encoding="utf-8")
    return [*bos, *tokenizer.encode(text)][:NUM_TEXT_TOKENS]


def real(path: Path, folder: Path, *, bos: Sequence[int] = ()) -> dict[str, object]:
    ids = text_of(path, bos=bos)
    unpacked = folder / f"{path.stem}.f32.gguf"
    if not unpacked.exists():
        rewrite(path, unpacked)
    return {"ids": ids, "perplexity": perplexity(peer_logits(unpacked, ids), ids)}


def toy(name: str, folder: Path) -> dict[str, object]:
    family = FAMILIES[name]
    tensors = family.tensors(family.build(seed=1, vocab_size=len(TOKENS)))
    path = folder / f"{name}.gguf"
    write_gguf(path, family.architecture, family.metadata, tensors, tokenizer=True)
    ids = torch.randint(256, (NUM_TOY_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    top = peer_logits(path, ids).topk(NUM_TOP)
    return {
        "ids": ids,
        "top_ids": top.indices.tolist(),
        "top_logits": [[round(x, 5) for x in row] for row in top.values.tolist()],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    smollm2, gemma3 = packaged_model_path(), assembled_gemma_path(folder)
    assert smollm2 is not None
    assert gemma3 is not None
    golden = {
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "smollm2": real(smollm2, folder),
        "gemma3": real(gemma3, folder, bos=(2,)),
        "toys": {name: toy(name, folder) for name in sys.argv[2:] or FAMILIES},
    }
    out = Path(__file__).with_name("llama_cpp.json")
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
