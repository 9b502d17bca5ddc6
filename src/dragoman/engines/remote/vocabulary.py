"""The tokenizer of the model that the upstreams run, from what lies on this machine."""

from pathlib import Path

from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.local.model import Model
from dragoman.engines.local.tokenizer import LlamaTokenizer
from dragoman.engines.protocol import Tokenizer


class GgufTokenizer(LlamaTokenizer):
    """The vocabulary of a GGUF file, and its templates. The weights in it are mapped, and never read."""

    def __init__(self, path: Path) -> None:
        model = Model(path)
        super().__init__(model)
        self.templates = model.templates
        self.special_tokens = self.texts(model.named_ids)
        self.longest = model.trained_context


def tokenizer_of(name: str) -> Tokenizer:
    """A GGUF file, or what HfTokenizer takes: a folder with tokenizer.json, or a name."""
    path = Path(name).expanduser()
    return (
        GgufTokenizer(path) if path.suffix == ".gguf" else HfTokenizer(str(path) if path.exists() else name)
    )
