"""Chat data; for the template of Qwen3 see `golden/templates/readme.md`."""

import itertools
import json

import numpy as np
import pytest

from dflash_jax.checkpoint.gguf import read_tokenizer
from dflash_jax.pair import embedded_target
from train.chat import encode_chat, read_documents
from train.store import Example, write_shard

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
END = "<|im_end|>"


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture(scope="module")
def smollm2():
    return read_tokenizer(embedded_target())


@pytest.fixture
def with_template(smollm2, monkeypatch):
    """SmolLM2's tokenizer, whose special tokens are Qwen3's too, under another template."""

    def change(template):
        monkeypatch.setattr(smollm2, "chat_template", template)
        return smollm2

    return change


@pytest.fixture
def qwen3(with_template, golden):
    return with_template((golden / "templates/qwen3.jinja").read_text(encoding="utf-8"))


def spans(tokenizer, ids, supervised):
    """The whole text, and the runs of it that are supervised."""
    runs = [
        tokenizer.decode([i for i, _ in run])
        for on, run in itertools.groupby(zip(ids, supervised), key=lambda x: x[1])
        if on
    ]
    return tokenizer.decode(ids), runs


ONE = [user("Hi"), assistant("Hello!")]
TWO = [*ONE, user("2+2?"), assistant("It is 4.")]


@pytest.mark.parametrize(
    ("messages", "turns", "text", "runs"),
    [
        (ONE, "all", SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n", ["Hello!" + END]),
        (
            TWO, "all",
            SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n",
            ["Hello!" + END, "It is 4." + END],
        ),
        (
            TWO, "last",
            SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n",
            ["It is 4." + END],
        ),
        (
            [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("\n  Hé 日本 🏔️ \n")], "all",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n  Hé 日本 🏔️ \n<|im_end|>\n",
            ["\n  Hé 日本 🏔️ \n" + END],
        ),
        # What a user says is no turn, though it reads like one.
        (
            [user("Hello!"), assistant("Hello!"), user("Hello!"), assistant("Hello!")], "last",
            SYSTEM + "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
            "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n",
            ["Hello!" + END],
        ),
    ],
    ids=["one", "two", "last", "spaces", "echo"],
)  # fmt: skip
def test_smollm2s_masks(smollm2, messages, turns, text, runs):
    ids, supervised = encode_chat(smollm2, messages, turns)
    assert spans(smollm2, ids, supervised) == (text, runs)


THOUGHT = "<think>\nTwo and two.\n</think>\n\nIt is 4."
Q1, Q2 = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"  # fmt: skip
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("messages", "turns", "text", "runs"),
    [
        # The template puts an empty think block into a last turn that does not think: not the target's.
        (ONE, "all", Q1 + EMPTY + "Hello!<|im_end|>\n", ["Hello!" + END]),
        (TWO, "all", Q1 + "Hello!<|im_end|>\n" + Q2 + EMPTY + "It is 4.<|im_end|>\n", ["Hello!" + END, "It is 4." + END]),
        (TWO, "last", Q1 + "Hello!<|im_end|>\n" + Q2 + EMPTY + "It is 4.<|im_end|>\n", ["It is 4." + END]),
        # With thinking on the target writes the block itself.
        ([user("2+2?"), assistant(THOUGHT)], "all", Q2 + THOUGHT + "<|im_end|>\n", [THOUGHT + END]),
        (
            [user("2+2?"), assistant("It is 4.", reasoning_content="Two and two.")], "all",
            Q2 + THOUGHT + "<|im_end|>\n", [THOUGHT + END],
        ),
        # An earlier turn's thinking is not shown, so it is not supervised either.
        (
            [user("2+2?"), assistant(THOUGHT), user("Hi"), assistant("<think>\nHm.\n</think>\n\nHello!")], "all",
            Q2 + "It is 4.<|im_end|>\n" + Q1 + "<think>\nHm.\n</think>\n\nHello!<|im_end|>\n",
            ["It is 4." + END, "<think>\nHm.\n</think>\n\nHello!" + END],
        ),
        (
            [user("2+2?"), assistant(THOUGHT), user("Hi"), assistant("<think>\nHm.\n</think>\n\nHello!")], "last",
            Q2 + "It is 4.<|im_end|>\n" + Q1 + "<think>\nHm.\n</think>\n\nHello!<|im_end|>\n",
            ["<think>\nHm.\n</think>\n\nHello!" + END],
        ),
    ],
    ids=["one", "two", "last", "thinking", "reasoning", "history", "history-last"],
)  # fmt: skip
def test_qwen3s_masks(qwen3, messages, turns, text, runs):
    ids, supervised = encode_chat(qwen3, messages, turns)
    assert spans(qwen3, ids, supervised) == (text, runs)


def test_a_document_breaks_into_the_ids_of_its_prompt_and_its_response(smollm2):
    messages = [user("Hi"), assistant("\n\n  Hello")]
    ids, supervised = encode_chat(smollm2, messages)
    prompt = smollm2.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=False
    )
    assert ids[: len(prompt)] == prompt
    assert supervised.index(True) == len(prompt)


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize(("turns", "runs"), [("all", ["Hello!" + END, "It is 4." + END]), ("last", ["It is 4." + END])])  # fmt: skip
def test_a_template_that_marks_the_assistants_text_is_believed(with_template, turns, runs):
    tokenizer = with_template(MARKED)
    assert spans(tokenizer, *encode_chat(tokenizer, TWO, turns))[1] == runs


LINE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + LINE + "{% endfor %}" + PROMPT


def ending(expression):
    """`PLAIN` with something more behind a conversation that is over."""
    return PLAIN.replace("{% endif %}", "{% else %}{{ " + expression + " }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages|length }} turns\n" + PLAIN, r"what comes before messages\[1\] otherwise"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content|upper }}"), r"where messages\[1\] ends"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content[:6] }}"), r"where messages\[1\] ends"),
        (ending("messages[1].content"), r"where messages\[1\] ends"),
        (ending("messages[1].content[-1:]"), r"where messages\[1\] ends"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content|length }} {{ m.content }}"), r"where messages\[1\] ends"),
        (PLAIN.replace("<|im_end|>", ""), "with no special token"),
        (MARKED.replace("== 'assistant'", "== 'nobody'"), "generation block marks nothing"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_show_its_turns_is_refused(with_template, template, message):
    with pytest.raises(ValueError, match=message):
        encode_chat(with_template(template), ONE)


@pytest.mark.parametrize("messages", [ONE, TWO, [{"role": "system", "content": "Be brief."}, *ONE]])
def test_a_template_whose_prompts_leave_out_what_is_asked_is_refused(with_template, messages):
    """Else the user's text would stand behind the prompt, and be supervised."""
    every = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    template = "<|im_start|>{% if not add_generation_prompt %}" + every + "{% endif %}"
    with pytest.raises(ValueError, match=r"does not show messages\[\d\] before its answer"):
        encode_chat(with_template(template), messages)


def test_a_template_whose_prompts_are_not_the_conversation_is_refused(with_template):
    """The last question alone is this conversation's beginning too."""
    template = "{% for m in (messages[-1:] if add_generation_prompt else messages) %}" + LINE + "{% endfor %}" + PROMPT  # fmt: skip
    with pytest.raises(ValueError, match="does not show the turns one after another"):
        encode_chat(with_template(template), [*ONE, *ONE])


TOOLS = [user("2+2?"), assistant("Let me see."), {"role": "tool", "content": "4"}, assistant("It is 4.")]  # fmt: skip


def test_what_a_tool_returns_is_context(smollm2, tmp_path):
    text, runs = spans(smollm2, *encode_chat(smollm2, TOOLS))
    share = [{"from": f, "value": m["content"]} for f, m in zip(("human", "gpt", "observation", "gpt"), TOOLS)]  # fmt: skip
    (document,), _ = read_documents(write(tmp_path, {"conversations": share}), smollm2, 100)
    assert spans(smollm2, document.tokens, document.supervised) == (text, runs)
    assert "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n" in text
    assert runs == ["Let me see." + END, "It is 4." + END]


@pytest.mark.parametrize(
    ("thinking", "runs"),
    [("keep", [THOUGHT + END] * 2), ("strip", ["It is 4." + END] * 2)],
)
def test_chatml_shows_the_reasoning_of_every_turn(tmp_path, smollm2, thinking, runs):
    turns = [user("2+2?"), assistant(THOUGHT)] * 2
    path = write(tmp_path, {"messages": turns})
    (document,), _ = read_documents(path, smollm2, 200, thinking=thinking)
    text, found = spans(smollm2, document.tokens, document.supervised)
    shown = THOUGHT if thinking == "keep" else "It is 4."
    turn = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n" + shown + "<|im_end|>\n"
    assert (text, found) == (SYSTEM + turn * 2, runs)


def test_qwen3_shows_what_a_tool_returns_as_the_users(qwen3):
    text, runs = spans(qwen3, *encode_chat(qwen3, TOOLS))
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n" in text
    assert runs == ["Let me see." + END, "It is 4." + END]


def test_a_template_without_tools_is_refused_where_there_is_one(with_template):
    silent = PLAIN.replace("messages %}", "messages if m.role != 'tool' %}")
    with pytest.raises(ValueError, match=r"does not show messages\[2\] before its answer"):
        encode_chat(with_template(silent), TOOLS)


def test_a_tokenizer_that_spells_parts_otherwise_is_refused(smollm2):
    class Spaced:
        """Puts a space before every text, as some SentencePiece tokenizers do."""

        def __getattr__(self, name):
            return getattr(smollm2, name)

        def __call__(self, text, **options):
            space = "" if text.startswith("<|im_end|>") else " "
            return smollm2(space + text, **options)

    with pytest.raises(ValueError, match="spells a turn otherwise alone"):
        encode_chat(Spaced(), ONE)


def test_a_template_may_trim_its_turns(with_template):
    tokenizer = with_template(PLAIN.replace("{{ m.content }}", "{{ m.content|trim }}"))
    ids, supervised = encode_chat(tokenizer, [user("Hi"), assistant("  Hello! \n")])
    assert spans(tokenizer, ids, supervised)[1] == ["Hello!" + END]


def test_a_conversation_that_an_assistant_opens_is_refused(smollm2):
    with pytest.raises(ValueError, match=r"messages\[0\] is an assistant turn"):
        encode_chat(smollm2, [assistant("Hello!"), *TWO])


# Files.


def write(folder, *rows, name="chats.jsonl"):
    path = folder / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")  # fmt: skip
    return path


def test_every_form_of_a_line_is_read(tmp_path, smollm2, capsys):
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    path = write(
        tmp_path, {"messages": ONE}, "", {"conversations": share}, {"text": "Once upon\u2028a time"}
    )
    documents, report = read_documents(path, smollm2, 100)
    assert [d.id for d in documents] == [f"chats.jsonl, line {n}" for n in (1, 3, 4)]
    a, b, c = (spans(smollm2, d.tokens, d.supervised) for d in documents)
    assert a == b
    assert a[1] == ["Hello!" + END]
    assert c == ("Once upon\u2028a time", ["Once upon\u2028a time"])
    assert (report.kept, report.cut, report.dropped, report.unsupervised) == (3, 0, 0, 0)
    tokens = sum(len(d.tokens) for d in documents)
    supervised = sum(int(d.supervised.sum()) for d in documents)
    assert (report.tokens, report.supervised) == (tokens, supervised)
    said = f"3 documents, {tokens} tokens, {supervised} of them supervised"
    assert said in capsys.readouterr().err


def test_a_text_file_is_a_document_a_line(tmp_path, smollm2):
    path = write(tmp_path, "Once upon a time", "", '{"text": 1}', name="a.txt")
    documents, _ = read_documents(path, smollm2, 100)
    assert [smollm2.decode(d.tokens) for d in documents] == ["Once upon a time", '{"text": 1}']
    assert all(d.supervised.all() for d in documents)


def test_a_shard_of_answers_is_read_as_it_is(tmp_path, smollm2):
    supervised = np.array([False, False, True, True])
    answer = Example.bare("question-7", "math", np.array([5, 6, 7, 8], np.int32), supervised)
    write_shard(tmp_path / "store", 0, [answer], ())
    path = tmp_path / "store/00000.safetensors"
    (found,), report = read_documents(path, smollm2, 4)
    assert (found.id, found.kind, found.tokens.tolist()) == ("question-7", "math", [5, 6, 7, 8])
    assert found.supervised.tolist() == supervised.tolist()
    assert (report.kept, report.supervised) == (1, 2)
    documents, report = read_documents(path, smollm2, 3, too_long="cut")
    assert (documents, report.unsupervised) == ([], 1)  # one supervised token alone teaches nothing


def test_what_a_user_says_last_is_left_out(tmp_path, smollm2):
    documents, _ = read_documents(write(tmp_path, {"messages": [*ONE, user("And?")]}), smollm2, 100)
    assert "And?" not in smollm2.decode(documents[0].tokens)


@pytest.mark.parametrize(
    ("thinking", "runs"), [("keep", [THOUGHT + END]), ("strip", ["It is 4." + END])]
)
def test_reasoning_is_kept_or_taken_out(tmp_path, qwen3, thinking, runs):
    reasoned = assistant("It is 4.", reasoning_content="Two and two.")
    path = write(tmp_path, *({"messages": [user("2+2?"), a]} for a in (assistant(THOUGHT), reasoned)))  # fmt: skip
    documents, _ = read_documents(path, qwen3, 100, thinking=thinking)
    for document in documents:
        text, found = spans(qwen3, document.tokens, document.supervised)
        assert found == runs
        assert text.count("<think>") == 1, "stripped, the template's empty block is left"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "needs an object with one of"),
        ({"prompt": "Hi"}, r"needs an object with one of \['messages', 'conversations', 'text'\]"),
        ({"text": 3}, "text is no string but int"),
        ({"messages": []}, "messages is no list of at least 1 turn"),
        ({"messages": "Hi"}, "messages is no list of at least 1 turn"),
        ({"messages": ["Hi"]}, r"messages\[0\] is no object with role and content"),
        ({"messages": [user("a"), {"role": "bot", "content": "b"}]}, r"messages\[1\].role 'bot' is none of \['system', 'user', 'assistant', 'tool'\]"),
        ({"messages": [{"role": ["user"], "content": "b"}]}, r"messages\[0\].role \['user'\] is none of"),
        ({"messages": [{"from": "human", "value": "b"}]}, r"messages\[0\].role None is none of"),
        ({"messages": [user("a"), assistant(None)]}, r"messages\[1\].content is no string but NoneType"),
        ({"messages": [user([{"type": "image"}]), assistant("b")]}, r"messages\[0\].content is no string but list"),
        ({"messages": [user("a"), assistant("b", reasoning_content=1)]}, r"messages\[1\].reasoning_content is no string but int"),
        ({"messages": [user("a"), assistant("b", tool_calls=[{}])]}, r"messages\[1\].tool_calls: calls beside"),
        ({"messages": [user("a")]}, "messages has no assistant turn"),
        ({"messages": [assistant("a")]}, r"messages\[0\] is an assistant turn"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, r"conversations\[0\].from 'robot' is none of"),
        ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\].value is no string but NoneType"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, smollm2, row, message):
    path = write(tmp_path, {"messages": ONE}, "", row)
    with pytest.raises(ValueError, match=rf"^chats.jsonl, line 3: {message}"):
        read_documents(path, smollm2, 100)


def test_long_documents_are_left_out_or_cut_and_counted(tmp_path, smollm2, capsys):
    long = {"messages": [user("Count"), assistant("one two three " * 30)]}
    path = write(tmp_path, {"messages": ONE}, long, {"messages": [user("word " * 60), assistant("No")]})  # fmt: skip
    documents, report = read_documents(path, smollm2, 50)
    assert [d.id for d in documents] == ["chats.jsonl, line 1"]
    assert (report.kept, report.cut, report.dropped, report.unsupervised) == (1, 0, 2, 0)
    assert "of over 50 tokens 2 left out and 0 cut" in capsys.readouterr().err
    documents, report = read_documents(path, smollm2, 50, too_long="cut")
    assert [len(d.tokens) for d in documents] == [len(encode_chat(smollm2, ONE)[0]), 50]
    assert documents[1].supervised[-1]
    assert (report.kept, report.cut, report.dropped, report.unsupervised) == (2, 1, 0, 1)
    assert "0 left out and 1 cut; 1 left out with nothing to learn from" in capsys.readouterr().err


def test_the_most_tokens_are_kept_whole(tmp_path, smollm2):
    n = len(encode_chat(smollm2, ONE)[0])
    path = write(tmp_path, {"messages": ONE})
    assert [read_documents(path, smollm2, size)[1].kept for size in (n, n - 1)] == [1, 0]
    with pytest.raises(ValueError, match="max_length=1 is less than 2"):
        read_documents(path, smollm2, 1)
