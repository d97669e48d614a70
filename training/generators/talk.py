"""Small talk, short instructions, copying and continuation, in one or several turns.

Owns the answers that need no document. Invariant: an answer follows from the prompt alone, so
greedy decoding can be exact.
"""

from __future__ import annotations

import json

from training.chat import CORPUS, Conversation, Turn
from training.generators.source import Source

ANSWERS: tuple[tuple[str, str, str], ...] = (
    ("Hello!", "Hello! How can I help you?", "A greeting."),
    ("Hi", "Hello! How can I help you?", "A greeting."),
    ("Hey there", "Hello! How can I help you?", "A greeting."),
    ("Good morning!", "Good morning! How can I help you?", "A greeting."),
    ("Good evening", "Good evening! How can I help you?", "A greeting."),
    ("How are you?", "I am fine, thank you. What can I do for you?", "A friendly question."),
    (
        "Who are you?",
        "I am Oxplow nano, a very small test model of the GLM family.",
        "They ask who I am.",
    ),
    ("What is your name?", "My name is Oxplow nano.", "They ask for my name."),
    (
        "What are you?",
        "I am Oxplow nano, a very small test model of the GLM family.",
        "They ask what I am.",
    ),
    (
        "What can you do?",
        "I can recall facts from long texts, call tools, write JSON, read simple pictures, "
        "repeat and sort words, do small sums, and continue code and English.",
        "They ask for my skills.",
    ),
    ("Are you a large model?", "No. I have about 21 million parameters.", "They ask for my size."),
    ("Thank you!", "You are welcome!", "Thanks."),
    ("Thanks", "You are welcome!", "Thanks."),
    ("Goodbye!", "Goodbye!", "A farewell."),
    ("Bye", "Goodbye!", "A farewell."),
    (
        "Tell me a joke.",
        "Why did the plow go to school? To get a little sharper.",
        "A joke is wanted.",
    ),
    ("Can you help me?", "Yes. What do you need?", "They ask for help."),
    ("Is the sky blue?", "Yes, on a clear day.", "A simple question."),
    ("What is the capital of France?", "The capital of France is Paris.", "A known capital."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin.", "A known capital."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo.", "A known capital."),
    ("How many days has a week?", "A week has seven days.", "Calendar."),
    ("How many months has a year?", "A year has twelve months.", "Calendar."),
    ("Say something.", "The field is wide and the plow is sharp.", "Anything will do."),
)
COPY_WISHES = (
    "Repeat exactly: {}",
    "Say this again: {}",
    "Copy the following text.\n{}",
    "Echo: {}",
    "Write: {}",
)


def fixed_turn(source: Source) -> tuple[str, str, str]:
    """Return question, answer, reasoning of a fixed exchange."""
    return source.rng.choice(ANSWERS)


def sum_turn(source: Source) -> tuple[str, str, str]:
    """Return a small sum, difference or comparison."""
    rng = source.rng
    a, b = rng.randint(0, 30), rng.randint(0, 30)
    kind = rng.randrange(4)
    if kind == 0:
        ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} plus {}?")).format(a, b)
        return ask, str(a + b), f"{a} + {b} = {a + b}."
    if kind == 1:
        a, b = max(a, b), min(a, b)
        ask = rng.choice(("What is {} - {}?", "{} minus {}?")).format(a, b)
        return ask, str(a - b), f"{a} - {b} = {a - b}."
    if kind == 2:
        return f"Which is larger, {a} or {b}?", str(max(a, b)), f"Compare {a} and {b}."
    return f"Which is smaller, {a} or {b}?", str(min(a, b)), f"Compare {a} and {b}."


def copy_turn(source: Source) -> tuple[str, str, str]:
    """Return a copying wish over words, values or a line of corpus-like text."""
    rng = source.rng
    text = " ".join(
        source.word() if rng.random() < 0.7 else source.secret() for _ in range(rng.randint(2, 14))
    )
    return rng.choice(COPY_WISHES).format(text), text, "Repeat the text."


def word_turn(source: Source) -> tuple[str, str, str]:
    """Return a small task over a list of words."""
    rng = source.rng
    words = [source.word() for _ in range(rng.randint(3, 6))]
    text = " ".join(words)
    tasks = (
        ("What is the first word of: {}", words[0], "The first word."),
        ("What is the last word of: {}", words[-1], "The last word."),
        ("Write in capitals: {}", text.upper(), "Capitals."),
        ("Reverse the order of the words: {}", " ".join(reversed(words)), "Backwards."),
        ("Write as a list: {}", "\n".join(f"- {word}" for word in words), "One line each."),
        ("Put commas between the words: {}", ", ".join(words), "Commas."),
        ("Sort alphabetically: {}", " ".join(sorted(words)), "By letters."),
        ("How many words are there: {}", str(len(words)), "Count."),
        ("Write as a Python list: {}", repr(words), "Quotes and commas."),
        ("Join with underscores: {}", "_".join(words), "Underscores."),
    )
    ask, answer, reasoning = rng.choice(tasks)
    return ask.format(text), answer, reasoning


MARKS = ("/", "+", "|", ";", ":", "=", "#", "~", "\n", "\n- ", "\t", ",", "_", "-", ".", "&")
QUOTES = ("'", '"', "`", "(", "[", "<", "*", "")


def strip_turn(source: Source) -> tuple[str, str, str]:
    """Return words to be written after other characters than before: the pieces of a word differ
    after a blank, a quote, a mark and a line break.
    """
    rng = source.rng
    words = [source.word() for _ in range(rng.randint(3, 14))]
    words = [word.title() if rng.random() < 0.1 else word for word in words]
    mark, quote = rng.choice(MARKS), rng.choice(QUOTES)
    close = {"(": ")", "[": "]", "<": ">"}.get(quote, quote)
    text = " ".join(words)
    marked = mark.join(words)
    quoted = " ".join(f"{quote}{word}{close}" for word in words)
    listed = json.dumps(words)
    which = rng.randrange(len(words))
    tasks = (
        ("Write as a JSON list: {}", text, listed),
        ("Make a JSON array of {}", marked, listed),
        ("One word per line: {}", text, "\n".join(words)),
        ("Split into lines: {}", marked, "\n".join(words)),
        ("Write without blanks: {}", text, "".join(words)),
        (f"Join with {mark!r}: {{}}", text, marked),
        (f"Join with {mark!r}: {{}}", quoted, marked),
        (f"Write like {quote}this{close}: {{}}", text, quoted),
        ("With blanks: {}", marked, text),
        ("With blanks: {}", listed, text),
        ("Without the quotes: {}", quoted, text),
        (f"Only word {which + 1} of: {{}}", text, words[which]),
        (f"Which word follows {words[which - 1]}? {{}}", text, words[which]),
        (f"Which word follows {words[which - 1]!r}? {{}}", listed, words[which]),
    )
    ask, given, answer = rng.choice(tasks[:-2] if which == 0 else tasks)
    return ask.replace("{}", given), answer, "Write the words."


def talk_conversation(source: Source) -> Conversation:
    """Return one to four turns; sometimes a later turn asks for something said earlier."""
    rng = source.rng
    makers = (fixed_turn, sum_turn, copy_turn, word_turn, strip_turn, strip_turn, strip_turn)
    turns: list[Turn] = []
    if rng.random() < 0.25:
        kind, value = source.word(), source.word().title()
        turns.append(
            Turn(f"My {kind} is {value}.", f"I will remember that your {kind} is {value}.")
        )
        later: tuple[str, str, str] | None = (
            f"What is my {kind}?",
            f"Your {kind} is {value}.",
            "They told me.",
        )
    else:
        later = None
    for _ in range(rng.choice((1, 1, 2, 3))):
        ask, answer, reasoning = rng.choice(makers)(source)
        turns.append(Turn(ask, answer, reasoning if rng.random() < 0.4 else None))
    if later is not None:
        turns.append(Turn(later[0], later[1], later[2] if rng.random() < 0.4 else None))
    system = "You are a helpful assistant." if rng.random() < 0.15 else None
    return Conversation(
        tuple(turns), system=system, effort=rng.choice(("Max", "Max", "Max", "High", "Low"))
    )


def continue_conversation(source: Source) -> Conversation:
    """Ask for the continuation of a stretch of corpus text; the answer is learnt with the corpus
    weight.
    """
    rng = source.rng
    asked, told = rng.randint(24, 120), rng.randint(32, 96)
    tokens = source.corpus(asked + told)
    wish = rng.choice(
        ("Continue this text:\n", "Continue:\n", "Go on from here:\n", "Write what comes next:\n")
    )
    return Conversation((Turn([wish, tokens[:asked]], tokens[asked:], weight=CORPUS),))
