"""Loading of a model's tokenizer, and checks of it: transformers 5 makes up what a folder lacks.

- From a folder without tokenizer files, some families get an empty tokenizer, which gives no token for any text.
- Sentencepiece's `tokenizer.model` alone is read without the space that LLaMA puts before a text, so that the first
  word becomes another token.
- `tokenizer.json` alone does not say which tokens frame a document.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, StrictDataclassError
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    LlamaTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from sparseforge_ds.checkpoint.model_files import check_model_folder
from sparseforge_ds.model.hub_access import why_unreachable
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.model.registration import BUILD_ERRORS, load_config

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tokenizer_config.json")
"""Files of a tokenizer; a folder without any of them has none."""
_MOST_RENAMED = 0.1
"""Share of the ids of both that may have other names in a teacher's tokenizer; another tokenizer differs in most."""
_MISMATCH = (
    "tokenizer and weights do not belong together, or tokens were added: bring the tokenizer that the weights were "
    "trained with"
)
_SAMPLE_TEXT = "Hello world, it is 12:30.\nA new line, and caf\N{LATIN SMALL LETTER E WITH ACUTE}s."
"""Text for which a tokenizer is compared with its sentencepiece model."""


def read_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, from its folder or from the hub.

    Raises:
        ValueError: there is none, it cannot be read, or it gives other tokens than its own sentencepiece model.
    """
    folder = Path(name)
    if folder.is_dir():
        check_model_folder(folder)
    with tokenizer_errors("its tokenizer cannot be read"):
        return _load(name, folder)


@contextlib.contextmanager
def tokenizer_errors(beginning: str) -> Iterator[None]:
    """Turn any error of a tokenizer in the block into a ValueError with this `beginning`.

    The tokenizers library raises `Exception` itself. A panic of its Rust code is not even that, and some come late: a
    regular expression that backtracks too often is known by the first text for which it does.
    """
    try:
        yield
    except BaseException as error:
        of_tokenizers = type(error) is Exception or type(error).__name__ == "PanicException"
        if not of_tokenizers and not isinstance(error, (OSError, ValueError, *BUILD_ERRORS, StrictDataclassError)):
            raise
        raise ValueError(f"{beginning} ({reason(error)})") from None


def _load(name: str | Path, folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, or by its name on the hub if there is no such folder."""
    if folder.is_dir() and not any((folder / file).is_file() for file in _FILES):
        raise ValueError(f"none of {', '.join(_FILES[:4])} is there; copy the tokenizer's files into the folder")
    # A folder with sentencepiece's model alone needs the normalization that is written in it.
    bare = folder.is_dir() and not (folder / "tokenizer_config.json").is_file()
    if bare and (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        tokenizer = _as_trained(
            LlamaTokenizer.from_pretrained(folder, trust_remote_code=False), folder / "tokenizer.model"
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            name, local_files_only=why_unreachable(name) is not None, trust_remote_code=False
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    # Without tokenizer_config.json, the model's config has the tokens that frame a document.
    if bare and (folder / "config.json").is_file():
        _frame_as_config_says(tokenizer, load_config(folder, str(folder)))
    _check_ids(tokenizer, folder)
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Reject a tokenizer with tokens that the model has no embedding for: training may meet any of them."""
    size = int(config.get_text_config().vocab_size)
    without_embedding = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= size)
    if without_embedding:
        number, token = without_embedding[0]
        raise ValueError(
            f"its tokenizer has {len(without_embedding)} tokens without an embedding, the first is {token!r} with id "
            f"{number} in a vocabulary of {size} (config.json); {_MISMATCH}"
        )


def check_tokens(ids: Iterable[int], size: int, name: str) -> None:
    """Reject tokens of a text that the model has no embedding for.

    Tokens that the tokenizer has but the text does not are allowed, such as the padding that was added to tokenizers of
    LLaMA-2.

    Args:
        ids: tokens of the text.
        size: number of the model's embeddings.
        name: of the model, for the message.
    """
    if (largest := max(ids, default=0)) >= size:
        raise ValueError(f"{name}: its tokenizer gives token {largest}, the model has {size} embeddings; {_MISMATCH}")


def tokenizer_folder(name: str | Path) -> Path | None:
    """Return the folder with the tokenizer of a model, by its folder or its id on the hub; None if it has none.

    From the hub `tokenizer.json` is downloaded: tokenizers without that file are not compared with others.
    """
    folder = Path(name)
    if not folder.is_dir():
        try:
            file = hf_hub_download(str(name), _FILES[0], local_files_only=why_unreachable(name) is not None)
        except (EntryNotFoundError, OSError, ValueError):
            return None  # loading the model reports what is wrong with it
        folder = Path(file).parent
    return folder if any((folder / file).is_file() for file in _FILES) else None


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, teacher: Path) -> None:
    """Reject a teacher whose tokenizer numbers tokens differently: the teacher reads the student's ids.

    A few tokens may have other names: those that frame the turns of a chat, or reserved ones. Slow tokenizers are
    not compared.

    Args:
        tokenizer: of the student.
        teacher: folder with the tokenizer of the teacher.

    Raises:
        ValueError: tokens differ, or the teacher's tokenizer cannot be read.
    """
    other = read_tokenizer(teacher)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not isinstance(other, PreTrainedTokenizerFast):
        return
    own, others = ({number: token for token, number in each.get_vocab().items()} for each in (tokenizer, other))
    common = sorted(own.keys() & others.keys())
    differing = [number for number in common if own[number] != others[number]]
    if len(differing) > _MOST_RENAMED * len(common):
        first = differing[0]
        raise ValueError(
            f"{len(differing):,} of {len(common):,} numbers are other tokens in its tokenizer than in the model's, the "
            f"first is {first}: {others[first]!r} and {own[first]!r}; a teacher is given the model's numbers, so use "
            "one with the same tokenizer"
        )


def run_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str | list[str], **options: Any) -> BatchEncoding:
    """Call a tokenizer on texts.

    Args:
        tokenizer: of transformers.
        text: one text, or several.
        **options: of the call.

    Raises:
        ValueError: the tokenizer fails.
    """
    with tokenizer_errors("the tokenizer cannot read the text"):
        return tokenizer(text, **options)


def _as_trained(tokenizer: PreTrainedTokenizerBase, model: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the normalization that its sentencepiece model was trained with."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # needed for such folders only
    from tokenizers import Regex, normalizers

    proto = ModelProto()
    proto.ParseFromString(model.read_bytes())  # transformers has read it without an error
    spec = proto.normalizer_spec
    if not spec.precompiled_charsmap:  # as in LLaMA's own
        return tokenizer
    # The steps of sentencepiece's normalization, in its order.
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(spec.precompiled_charsmap)]
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:  # not left to the pre-tokenizer, which forgets it where a text began with a space
        steps += [normalizers.Prepend("\u2581")]
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = None
    # LlamaTokenizer would build its own again when it is loaded from what it saved.
    roles = {role: getattr(tokenizer, role) for role in ("bos_token", "eos_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def _frame_as_config_says(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Set BOS and EOS from the model's config, if the tokenizer names neither."""
    if tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None:
        return
    text = config.get_text_config()
    for role in ("bos_token", "eos_token"):
        number = getattr(text, f"{role}_id", None)
        number = number[0] if isinstance(number, list) and number else number
        token = tokenizer.convert_ids_to_tokens(number) if isinstance(number, int) else None
        if token is not None:
            setattr(tokenizer, role, token)


def _check_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Reject a tokenizer that gives no tokens, or other ones than its sentencepiece model."""
    ids = tokenizer(_SAMPLE_TEXT, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError("it gives no token for any text; copy the tokenizer's files into the folder")
    model = folder / "tokenizer.model"
    if not model.is_file() or (folder / "tokenizer.json").is_file():
        return
    from sentencepiece import SentencePieceProcessor  # needed for such folders only

    try:
        pieces = SentencePieceProcessor(model_file=str(model))
    except RuntimeError:  # some families call other formats tokenizer.model too
        return
    if ids != pieces.encode(_SAMPLE_TEXT):
        raise ValueError(
            f"transformers reads tokenizer.model as a {type(tokenizer).__name__} that gives other tokens than "
            'sentencepiece does; write its class into tokenizer_config.json, like {"tokenizer_class": "LlamaTokenizer"}'
        )
