"""`--loss_on completion`: which tokens are trained on, from a record to the labels of a micro-batch."""

from __future__ import annotations

import json
import logging

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.documents import Conversation
from sparseforge_ds.data.micro_batch import IGNORED, BatchLayout
from sparseforge_ds.data.mixture import find_source, find_text
from sparseforge_ds.data.producer import ChunkWriter
from sparseforge_ds.data.text_files import TextOptions
from sparseforge_ds.data.text_formats import document_from_record, iter_documents
from sparseforge_ds.data.token_cache import ensure_token_cache
from sparseforge_ds.data.tokenization import encode_trained, tokenize
from sparseforge_ds.data.windows import CachedWindows, ids_of_tokens, trained_flags
from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.train.spec import make_spec
from tests.tiny_folders import byte_tokenizer, deepspeed_json, write_json, write_model
from tests.tiny_streams import chunk_spec

PAIR = {"prompt": "ab", "completion": "cde"}
CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc", "tool_calls": None},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "\N{LATIN SMALL LETTER E WITH ACUTE}"},
]
PLAIN = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a{% endif %}"
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
    "{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)


def tokenizer_with(template=None):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def trained_text(record, tokenizer, frame="auto"):
    """Return the bytes of a record as a string, with a dot in place of each that is not trained on."""
    document = document_from_record(record, "text", "a.jsonl, line 1")
    ((ids, trained),) = encode_trained([document], tokenizer, frame)
    assert [ids] == tokenize([document], tokenizer, frame) and len(trained) == len(ids)
    letters = {256: "<", 257: ">"}
    return "".join(
        (letters.get(token) or tokenizer.decode([token])) if own else "."
        for token, own in zip(ids, trained, strict=True)
    )


@pytest.mark.parametrize(("frame", "expected"), [("auto", "...cde"), ("eos", "..cde>"), ("both", "...cde>")])
def test_a_completion_and_its_end_are_trained_on(frame, expected):
    assert trained_text(PAIR, byte_tokenizer(), frame) == expected


def test_half_of_a_surrogate_pair_moves_nothing():
    assert trained_text({"prompt": "\ud83d", "completion": "x"}, byte_tokenizer()) == "....x"


def test_a_token_of_the_prompts_end_and_the_completions_beginning_is_trained_on():
    """A space in front of an answer is part of the answer's first token, which may be its only one."""
    vocabulary = {letter: number for number, letter in enumerate(["a", "b", "c", "d", "e", "bc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    assert trained_text(PAIR, fast) == "..bcde"
    assert tokenize([document_from_record(PAIR, "text", "x")], fast) == [[6, 0, 5, 3, 4]]


@pytest.mark.parametrize("trims", [False, True])
def test_words_that_take_the_space_before_them_are_trained_on(trims):
    """Some tokenizers count that space to the word, others to nothing."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = letters.index("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {letters[space] + "4": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(letters[space], "4")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    tokenizer.add_special_tokens(["<s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")

    def trained(completion):
        document = document_from_record({"prompt": "Is: ", "completion": completion}, "text", "x")
        ((ids, flags),) = encode_trained([document], fast)
        return [fast.convert_ids_to_tokens(token) for token in np.array(ids)[flags].tolist()]

    assert trained("4") == [letters[space] + "4"]
    assert trained("y") == ["y"], "the prompt's own space is not trained on"


def test_the_assistants_turns_are_trained_on():
    tokenizer = tokenizer_with(MARKED)
    document = document_from_record({"messages": CHAT}, "text", "a.jsonl, line 1")
    ((ids, trained),) = encode_trained([document], tokenizer)
    text = "ua|abc|ud|a\N{LATIN SMALL LETTER E WITH ACUTE}|"
    turns = "bc|\N{LATIN SMALL LETTER E WITH ACUTE}|"
    assert ids == tokenizer(text)["input_ids"]
    assert np.array(ids)[trained].tolist() == tokenizer(turns)["input_ids"]
    assert [ids] == tokenize([document], tokenizer)
    assert trained_text({"messages": CHAT[:1]}, tokenizer) == "..."


def test_a_conversation_with_a_completion_needs_no_marks():
    record = {"prompt": CHAT[:3], "completion": CHAT[1:2]}
    assert trained_text(record, tokenizer_with(PLAIN)) == "." * len("ua|abc|ud|a") + "bc|"
    for missing in ([], None):  # all of it is the completion, or nothing
        without = {"prompt": missing, "completion": CHAT[1:2]}
        assert trained_text(without, tokenizer_with("{{ messages[0].content[:0] }}" + PLAIN)) == "abc|"
        unanswered = {"prompt": CHAT[:3], "completion": missing}
        assert trained_text(unanswered, tokenizer_with(PLAIN)) == "." * len("ua|abc|ud|")
    counted = "{{ messages | length }}" + PLAIN
    with pytest.raises(ValueError, match="line 1: the chat template of .* renders the prompt differently"):
        trained_text(record, tokenizer_with(counted))


def test_a_template_that_prints_the_date_gives_the_same_tokens_on_every_day():
    """A stream is tokenized over days, and a cache may be made again on another one."""
    tokenizer = tokenizer_with("{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}|" + MARKED)
    assert trained_text({"messages": CHAT}, tokenizer).startswith("." * len("<26 Jul 2024 12:00:00.000000|"))
    document = Conversation(tuple(CHAT), "a.jsonl, line 1")
    assert document.render(tokenizer).startswith("26 Jul 2024 12:00:00.000000|")


def test_a_template_that_does_not_mark_turns_is_refused():
    conversation = Conversation(tuple(CHAT), "a.jsonl, line 3")
    tokenizer = tokenizer_with(PLAIN)
    tokenizer.name_or_path = "tiny"
    with pytest.raises(ValueError, match=r"line 3: the chat template of tiny does not .*\{% generation %\}.*prompt"):
        encode_trained([conversation], tokenizer)
    with pytest.raises(ValueError, match="line 3: is a conversation, and the tokenizer has no chat template"):
        encode_trained([conversation], tokenizer_with())
    tokenizer = tokenizer_with("{{ range(10**5) | random }}" + MARKED)
    tokenizer.name_or_path = "tiny"
    with pytest.raises(ValueError, match="line 3: the chat template of tiny renders another text .*random.*constant"):
        encode_trained([conversation], tokenizer)
    with pytest.raises(ValueError, match=r"\(ByT5Tokenizer\) is a slow one.*tokenizer.json"):
        encode_trained([document_from_record(PAIR, "text", "x")], ByT5Tokenizer())


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def pairs(count=40):
    """Return pairs of very different lengths; some completions are empty."""
    return [{"prompt": "p" * (i * i % 11 + 1), "completion": "c" * (i * 7 % 5)} for i in range(count)]


@pytest.mark.parametrize("stream", ["", "stream:"])
def test_plain_text_is_refused_at_once(tmp_path, stream):
    (tmp_path / "a.txt").write_text("a text")
    write(tmp_path / "b.jsonl", [{"text": "a text"}])
    for name in ("a.txt", "b.jsonl"):
        with pytest.raises(ValueError, match=f"{name}, document 1: is plain text, .*--loss_on completion.*messages"):
            find_text([f"{stream}{tmp_path / name}"], TextOptions(loss_on="completion"))
    with pytest.raises(ValueError, match="is plain text, .*--loss_on completion"):
        find_text(["stdlib"], TextOptions(loss_on="completion"))
    late = find_source(
        stream + write(tmp_path / "c.jsonl", [{"text": ""}, PAIR, {"text": "x"}]), TextOptions(split="train")
    )
    assert list(late.read()) == ["", "abcde", "x"]
    late = find_source(f"{stream}{tmp_path / 'c.jsonl'}", TextOptions(loss_on="completion"))
    with pytest.raises(ValueError, match="c.jsonl, document 3: is plain text"):
        list(late.read())


@pytest.mark.parametrize(
    ("template", "importance", "message"),
    [
        (PLAIN, "fisher", "does not mark the assistant's turns"),
        (MARKED, "fisher", None),
    ],
)
def test_a_run_is_refused_before_any_text_is_tokenized(tmp_path, template, importance, message):
    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    arguments = RunArguments(
        deepspeed=str(write_json(tmp_path / "ds.json", deepspeed_json(importance=importance))),
        model=str(model),
        dataset=[write(tmp_path / "a.jsonl", [PAIR]), write(tmp_path / "b.jsonl", [{"messages": CHAT}])],
        output_dir=str(tmp_path / "run"),
        loss_on="completion",
        seq_length=16,
    )
    if message is None:
        assert [source.options.loss_on for source in make_spec(arguments, 1).text.sources] == ["completion"] * 2
    else:
        with pytest.raises(ValueError, match=message):
            make_spec(arguments, 1)


def test_completions_have_a_cache_with_a_flag_for_every_token(tmp_path):
    path = write(tmp_path / "a.jsonl", pairs())
    caches = {
        loss_on: ensure_token_cache(
            find_source(path, TextOptions(loss_on=loss_on)), byte_tokenizer(), tmp_path / "data", "both"
        )
        for loss_on in ("all", "completion")
    }
    unmarked, marked = caches["all"], caches["completion"]
    assert unmarked.key != marked.key and (unmarked.dtype, marked.dtype) == ("uint16", "uint16,?")
    token = marked.open()
    assert ids_of_tokens(token).tolist() == unmarked.open().tolist() and marked.largest_id == unmarked.largest_id == 257
    assert np.array_equal(trained_flags(token), np.isin(ids_of_tokens(token), byte_tokenizer()("c</s>")["input_ids"]))
    assert unmarked.trained is None and marked.trained == np.count_nonzero(trained_flags(token))
    assert marked.describe() == f"40 documents, loss on {marked.trained:,} of "
    again = ensure_token_cache(
        find_source(path, TextOptions(loss_on="completion")), byte_tokenizer(), tmp_path / "data", "both"
    )
    assert again == marked


def test_a_stream_has_the_marks_of_the_cache_however_often_it_stops(tmp_path):
    path = write(tmp_path / "a.jsonl", pairs())
    packed = ensure_token_cache(
        find_source(path, TextOptions(loss_on="completion")), byte_tokenizer(), tmp_path / "data"
    ).open()
    endless = np.tile(packed, 6)
    row = []
    for chunk in range(6):
        writer = ChunkWriter(
            chunk_spec(find_source(f"stream:{path}", TextOptions(loss_on="completion")), tmp_path / "chunks")
        )
        writer.write_next()
        writer.chunks.check(chunk)
        row.append(writer.chunks.open(chunk))
    joined = np.concatenate(row)
    assert joined.dtype == np.dtype("uint16,?") and len(joined) > len(packed)
    assert np.array_equal(joined, endless[: len(joined)])


S = 10


def batches(trained, micro=2, accumulation=1, world_size=1, rank=0):
    token = np.empty(len(trained), dtype="uint16,?")
    token["f0"] = np.arange(len(token))
    token["f1"] = trained
    return Batches([CachedWindows(token, "text", S, 0, 1)], [1], BatchLayout(micro, accumulation, world_size, rank))


@pytest.mark.parametrize(("micro", "accumulation", "world_size"), [(12, 1, 1), (3, 2, 2), (1, 4, 3), (2, 6, 1)])
def test_labels_and_their_mean_do_not_depend_on_the_layout(micro, accumulation, world_size):
    """Compare the mean over micro-batches with that over the step's trained tokens; a token's loss is its label."""
    trained = np.random.default_rng(0).random(2000) < np.repeat(np.random.default_rng(1).random(200) ** 4, S)
    undivided = batches(trained, 12)
    ranks = [batches(trained, micro, accumulation, world_size, rank) for rank in range(world_size)]
    empty = 0
    for _ in range(10):
        (step,) = undivided.step()
        label_T = step.label_BS[:, 1:].flatten()
        expected = label_T[label_T != IGNORED].double()
        assert step.trained == len(expected)
        parts = [part for rank in ranks for part in rank.step()]
        sums = [part.label_BS[:, 1:].masked_fill(part.label_BS[:, 1:] == IGNORED, 0).sum() for part in parts]
        means = [value.double() / part.trained for value, part in zip(sums, parts, strict=True)]
        torch.testing.assert_close(torch.stack(means).mean(), expected.mean())
        for part in parts:
            kept = part.label_BS != IGNORED
            assert torch.equal(part.label_BS[kept], part.token_BS[kept])
            assert torch.equal(kept, torch.from_numpy(trained)[part.token_BS])
        empty += sum(bool((part.label_BS[:, 1:] == IGNORED).all()) for part in parts)
        for stream in (undivided, *ranks):
            for _ in range(stream.layout.accumulation):
                stream.advance()
    assert (empty > 0) == (micro < 12)


def test_a_first_batch_without_any_trained_token_is_an_error_and_a_later_one_is_passed_over(caplog):
    caplog.set_level(logging.INFO)
    first = np.zeros(400, dtype=bool)
    first[::S] = True  # the first token of a sequence is not predicted in it
    stream = batches(first, 2, 2)
    with pytest.raises(AgreedError, match="sequences 0 to 3 is trained on; raise --global_batch or --seq_length"):
        stream.prepare_step()
    batch = next(stream.micro_batches(range(4)).__iter__())
    assert batch.trained == 0.5
    # Later a run can change neither its batch nor its sequences. Token 399 alone is trained on.
    last = np.zeros(400, dtype=bool)
    last[-1] = True
    stream = batches(last, 2, 2)
    stream.position = 4
    stream.prepare_step()
    begin = stream.position
    assert [stream.count_trained(range(first, first + 4)) for first in range(4, begin + 4, 4)] == [0] * (
        begin // 4 - 1
    ) + [1]
    assert caplog.text.count("passed over") == begin // 4 - 1
    # A text that has none at all, as one may be that a run is resumed with, ends the run.
    stream = batches(first, 2, 2)
    stream.position = 4
    with pytest.raises(
        AgreedError, match="no token of 1,000 batches from sequence 4 on is trained on; go on with other text"
    ):
        stream.prepare_step()
    batches(np.ones(400, dtype=bool), 2, 2).prepare_step()


def test_a_template_that_calls_itself_is_one_error():
    template = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    conversation = Conversation(tuple(CHAT), "a.jsonl, line 3")
    with pytest.raises(ValueError, match="line 3: the tokenizer's chat template refuses .*recursion.*jinja"):
        tokenize([conversation], tokenizer_with(template))
    with pytest.raises(ValueError, match="line 3: the tokenizer's chat template refuses"):
        encode_trained([conversation], tokenizer_with(MARKED + template))


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
TOOL_CHAT = [
    {"role": "user", "content": "2+3?"},
    {
        "role": "assistant",
        "reasoning_content": "sum",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
    },
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]
WITH_TOOLS = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %};"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_tools_calls_and_reasoning_go_through_the_template(tmp_path):
    """Read tools as a list and as text from JSON lines and parquet, as transformers renders them."""
    tokenizer = tokenizer_with(WITH_TOOLS)
    text = tokenizer.apply_chat_template(TOOL_CHAT, tools=TOOLS, tokenize=False)
    assert '[{"type": "function"' in text and '(sum)add{"a": 2, "b": 3};<tool>5' in text
    plain = {"messages": TOOL_CHAT[:1] + TOOL_CHAT[3:]}
    for name, tools in (("list", TOOLS), ("text", json.dumps(TOOLS))):
        records = [{"messages": TOOL_CHAT, "tools": tools}, {**plain, "tools": None}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / f"{name}.parquet")
        for suffix in ("jsonl", "parquet"):
            with_tools, without = iter_documents(str(tmp_path / f"{name}.{suffix}"), "text")
            assert with_tools.render(tokenizer) == text, (name, suffix)
            assert without.render(tokenizer) == "<user>2+3?<assistant>It is 5.;"
            assert trained_text_of(with_tools, tokenizer) == '(sum)add{"a": 2, "b": 3};It is 5.;'
            # A tokenizer may have a template of its own for conversations with tools.
            both = tokenizer_with({"default": "{{ messages }}", "tool_use": WITH_TOOLS})
            assert trained_text_of(with_tools, both) == trained_text_of(with_tools, tokenizer)
    # Prompt and completion, and templates without tools, are as before.
    pair = {"prompt": TOOL_CHAT[:1], "completion": TOOL_CHAT[1:2], "tools": TOOLS}
    document = document_from_record(pair, "text", "a.jsonl, line 1")
    assert (
        document.render(tokenizer).endswith('<user>2+3?<assistant>(sum)add{"a": 2, "b": 3};') and document.prompt == 1
    )
    with pytest.raises(ValueError, match="line 1: field 'tools' is no list of JSON schemas"):
        document_from_record({**plain, "tools": "add"}, "text", "a.jsonl, line 1")
    with pytest.raises(ValueError, match="with a role, and content or tool_calls"):
        document_from_record({"messages": [{"role": "assistant", "tool_calls": []}]}, "text", "a.jsonl, line 1")


def trained_text_of(document, tokenizer):
    ((ids, trained),) = encode_trained([document], tokenizer)
    return tokenizer.decode(np.array(ids)[trained])
